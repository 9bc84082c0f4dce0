"""Saved states of which each rank has its own part: a part goes back to the rank that it came from.

Parts have the same shapes on every rank, so another rank's would be taken without a word. Each says whose it is, by
``"rank"`` and ``"num_ranks"``, and is refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def whose(group: dist.ProcessGroup | None) -> dict[str, int]:
    """Says which rank this is, and of how many.

    Args:
        group: The ranks; None for all.

    Returns:
        ``"rank"`` and ``"num_ranks"``.
    """
    return {"rank": dist.get_rank(group), "num_ranks": dist.get_world_size(group)}


def check_own(state_dict: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Refuses another rank's part.

    Args:
        state_dict: A part, with what ``whose`` gave where it was saved.
        group: The ranks; None for all.

    Raises:
        ValueError: If it is another rank's, or of another number of ranks.
    """
    own = whose(group)
    found = {key: state_dict.get(key) for key in own}
    if found != own:
        raise ValueError(
            f"state_dict (=of rank {found['rank']} of {found['num_ranks']}) must be this rank's"
            f" (={own['rank']} of {own['num_ranks']}): shards do not move between ranks"
        )


def keep_own(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None) -> None:
    """Makes an optimizer's ``state_dict`` say whose it is, and its ``load_state_dict`` refuse another rank's.

    Args:
        optimizer: Over shards of this rank. A deep copy of it forgets this, as it does all hooks.
        group: The ranks; None for all.
    """
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, **whose(group)})
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: check_own(state_dict, group))
