"""torch optimizers over shards: parameter groups in one order on all ranks, and state dicts marked with their rank.

Shards have the same shapes on every rank, so a state dict of another rank would load without an error. Each is marked
with ``"rank"`` and ``"num_ranks"``, and refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from jaxddp.arguments import check_function, check_kind, check_mapping

ADVICE = "call clip_grad_norm_ of the wrapper, or do what else is to be done, before step() of the wrapper"

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Lists parameter groups, whose ``"params"`` are lists.

    ``params`` are as torch's optimizers take them: parameters, named or not, or groups of them with options.

    Raises:
        TypeError: If ``params`` or a group is a set.

    Example:
        >>> as_groups(iter([torch.tensor(1.0)]))
        [{'params': [tensor(1.)]}]
    """
    given = as_list(params)
    groups = given if not given or isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": as_list(check_group(group)["params"])} for group in groups]


def check_group(group: Any) -> dict[str, Any]:
    """Gives a parameter group back; refuses what is no dictionary with ``"params"`` by a ValueError."""
    if not isinstance(group, dict) or "params" not in group:
        raise ValueError(f"param_group (={group!r}) must be a dictionary with 'params'")
    return group


def as_list(params: Any) -> list[Any]:
    """Lists parameters or groups, each once: tied parameters are given under each of their names.

    Raises:
        TypeError: If it is a set.
    """
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            f"params (={type(params).__name__}) must be a list: a set is in another order in each process, and ranks"
            " must share one"
        )
    if not isinstance(params, Iterable) or isinstance(params, str):
        raise ValueError(f"params (={params!r}) must be parameters, or groups of them")
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    return list({id(one[1] if isinstance(one, tuple) else one): one for one in listed}.values())


def make_optimizer(
    optimizer_cls: Callable[..., torch.optim.Optimizer], params: Any, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Makes an optimizer.

    Raises:
        ValueError: If it is none, or does not take the options; torch's own if one is out of range.
    """
    check_function("optimizer_cls", optimizer_cls, "a torch optimizer's class")
    try:
        optimizer = optimizer_cls(params, **options)
    except TypeError as error:
        name = getattr(optimizer_cls, "__name__", optimizer_cls)
        raise ValueError(f"optimizer_cls (={name}) must take the options {dict(options)}: {error}") from error
    check_kind("optimizer_cls(...)", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    return optimizer


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, without the parameters and their names."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Gives an optimizer the options of another, group by group."""
    for given, taken in zip(source.param_groups, target.param_groups, strict=True):
        taken.update(group_options(given))


def rank_marks(group: dist.ProcessGroup | None) -> dict[str, int]:
    """``"rank"`` and ``"num_ranks"`` of this process in a group; None for all ranks."""
    return {"rank": dist.get_rank(group), "num_ranks": dist.get_world_size(group)}


def check_marks(state_dict: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Refuses a state dict of another rank, or of another number of ranks, by a ValueError."""
    check_mapping("state_dict", state_dict, "what state_dict() gave")
    expected = rank_marks(group)
    found = {key: state_dict.get(key) for key in expected}
    if found != expected:
        raise ValueError(
            f"state_dict (=of rank {found['rank']} of {found['num_ranks']}) must be this rank's"
            f" (={expected['rank']} of {expected['num_ranks']}): shards do not move between ranks"
        )


def mark_state_dicts(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None) -> None:
    """Makes an optimizer mark its ``state_dict`` with its rank, and refuse to load another rank's.

    Deep copies drop hooks, so call this for a copy again.
    """
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, **rank_marks(group)})
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: check_marks(state_dict, group))


def guard_step(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Makes an optimizer over shards step through its wrapper only, which puts ``grad_versions`` into what is returned.

    Global hooks, which run before, must not change the gradients: they see this rank's shards alone.
    """
    allowed: list[Any] = []

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not allowed:
            raise RuntimeError(
                "optimizer.step() alone, as a GradScaler calls it, updates this rank's shards and no parameter: call"
                " step() of the wrapper"
            )
        if allowed != [grad_versions(optimizer)]:
            raise RuntimeError(f"a hook of all optimizers changed this rank's shards of the gradients: {ADVICE}")

    optimizer.register_step_pre_hook(check)
    return allowed


def grad_versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Which tensors the gradients are, and how often they were changed in place."""
    grads = [one.grad for group in optimizer.param_groups for one in group["params"]]
    return [(id(grad), grad._version) for grad in grads if grad is not None]


def describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Describes what must be alike on every rank: the class, the groups and their options.

    ``names`` are those of the parameters, by id; they are not described if None.

    Example:
        >>> describe_optimizer(torch.optim.SGD([torch.zeros(2)], lr=0.1))["lr of group 0"]
        0.1
    """
    alike: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        if names is not None:
            alike[f"parameters of group {index}"] = ", ".join(names[id(one)] for one in group["params"])
        for name, option in group.items():
            value = option.tolist() if isinstance(option, torch.Tensor) else option
            if name != "params" and isinstance(value, (bool, int, float, str, tuple, list)):
                alike[f"{name} of group {index}"] = value
    return alike


def describe_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Describes what must be alike on every rank of the state of shards: what there is, and numbers such as a step.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> optimizer = torch.optim.Adam([weight])
        >>> weight.sum().backward(), optimizer.step()
        (None, None)
        >>> describe_state(optimizer, {id(weight): "weight"})
        {'state of weight': {'step': 1.0, 'exp_avg': '', 'exp_avg_sq': ''}}
    """
    return {
        f"state of {names[id(parameter)]}": {
            key: value if isinstance(value, (bool, int, float, str)) else _number(value) for key, value in state.items()
        }
        for parameter, state in optimizer.state.items()
    }


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and not value.ndim else ""
