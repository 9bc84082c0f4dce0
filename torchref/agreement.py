"""Ranks agree on what they train: one that differs would hang the others, or mix one tensor with another.

Compared before the first collective of a wrapper, a sharded optimizer or a trainer; the twin of
``jaxddp.training.agreement``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from jaxddp.roll_call import disagreement


def check_alike(alike: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Compares entries that must be the same on all ranks; every rank calls it.

    Raises:
        ValueError: If one differs, on every rank; the line names the first such entry and the ranks.
    """
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, dict(alike), group=group)  # not counted with the gradients
    if fault := disagreement(said, "rank"):
        refuse(fault, group)


def refuse(fault: str, group: dist.ProcessGroup | None = None) -> NoReturn:
    """Raises an error that all ranks have found, once all have: one that ended first would fail the others."""
    with contextlib.suppress(RuntimeError):
        dist.barrier(group)
    raise ValueError(fault)
