"""torch optimizers over shards: parameter groups in one order on all ranks, and state dicts marked with their rank.

Shards have the same shapes on every rank, so a state dict of another rank would load without an error. Each is marked
with ``"rank"`` and ``"num_ranks"``, and refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Lists parameter groups.

    Args:
        params: As torch's optimizers take them: parameters, named or not, or groups of them with options.

    Returns:
        Groups, whose ``"params"`` are lists.

    Raises:
        TypeError: If ``params`` or a group is a set.

    Example:
        >>> as_groups(iter([torch.tensor(1.0)]))
        [{'params': [tensor(1.)]}]
    """
    given = as_list(params)
    groups = given if not given or isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": as_list(group["params"])} for group in groups]


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
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    return list({id(one[1] if isinstance(one, tuple) else one): one for one in listed}.values())


def rank_marks(group: dist.ProcessGroup | None) -> dict[str, int]:
    """``"rank"`` and ``"num_ranks"`` of this process in a group; None for all ranks."""
    return {"rank": dist.get_rank(group), "num_ranks": dist.get_world_size(group)}


def check_marks(state_dict: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Refuses a state dict of another rank.

    Raises:
        ValueError: If it is another rank's, or of another number of ranks.
    """
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
