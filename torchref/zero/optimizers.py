"""torch optimizers over shards: which may be, parameter groups in one order on all ranks, and marked state dicts.

A rank's optimizer updates its part of each parameter. The result is that of the full parameter if the update of an
element depends only on the element's own gradient and state, and on numbers that are equal on all ranks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]

_ELEMENTWISE = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
}


def check_elementwise(optimizer: torch.optim.Optimizer, num_own_hooks: int = 0) -> None:
    """Refuses by a ValueError what is no element-wise optimizer of torch's, has other hooks, and does not say it is."""
    hooks = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    is_torchs = type(optimizer) in _ELEMENTWISE and len(hooks) <= num_own_hooks
    if not is_torchs and getattr(optimizer, "elementwise", False) is not True:
        raise ValueError(
            f"optimizer (={type(optimizer).__name__}) must be element-wise to be sharded: if each element is updated by"
            " itself, its hooks included, say so by optimizer.elementwise = True, or in its class;"
            " torchref.ShardedOptimizer takes any that updates parameters one by one"
        )


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Lists the parameter groups of what torch's optimizers take; a TypeError if parameters are in a set."""
    if not (given := _listed(params)):
        raise ValueError("params must list a parameter: a generator is used up when it was read once")
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": _listed(group["params"])} for group in groups]


def _listed(params: Any) -> list[Any]:
    if isinstance(params, (set, frozenset)):
        raise TypeError(f"params (={type(params).__name__}) must be a list: ranks must share one order")
    listed = [params] if isinstance(params, torch.Tensor) else list(params)  # tied ones come under each name
    found = list({id(one[1] if isinstance(one, tuple) else one): one for one in listed}.values())
    check_memory([one[1] if isinstance(one, tuple) else one for one in found])
    return found


def check_memory(params: Iterable[Any]) -> None:
    """Refuses two parameters in one memory, tied by their data: of what two shards update, one would be lost."""
    places = Counter(one.data_ptr() for one in params if isinstance(one, torch.Tensor) and one.numel())
    if any(place and count > 1 for place, count in places.items()):
        raise ValueError("params must not share memory: tie modules by one parameter, as in head.weight = table.weight")


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, without the parameters and their names."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Gives an optimizer the options of another, group by group."""
    for given, taken in zip(source.param_groups, target.param_groups, strict=True):
        taken.update(group_options(given))


def mark_state_dicts(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None) -> None:
    """Makes an optimizer mark its ``state_dict`` with its rank, and refuse that of another."""
    mine = {"rank": dist.get_rank(group), "num_ranks": dist.get_world_size(group)}

    def check(_: Any, state_dict: Mapping[str, Any]) -> None:
        found = {key: state_dict.get(key) for key in mine}
        if found != mine:
            raise ValueError(
                f"state_dict (=of rank {found['rank']} of {found['num_ranks']}) must be this rank's"
                f" (={mine['rank']} of {mine['num_ranks']}): shards do not move between ranks"
            )

    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, **mine})
    optimizer.register_load_state_dict_pre_hook(check)


def describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """What must be alike on every rank: class, groups and options, and parameters if their names are given, by id."""
    alike: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        if names is not None:
            alike[f"parameters of group {index}"] = ", ".join(names[id(one)] for one in group["params"])
        for name, option in group.items():
            value = option.tolist() if isinstance(option, torch.Tensor) else option
            if name not in ("params", "shards_of") and isinstance(value, (bool, int, float, str, tuple, list)):
                alike[f"{name} of group {index}"] = value
    return alike
