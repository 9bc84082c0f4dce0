"""What travels: how a bucket's buffer becomes its sum over ranks.

``none`` sends the buffer as it is. ``noop`` sends nothing and keeps the rank's own part, which makes wrong training
and an exact baseline: exposed communication is the time of a step minus the time of the same step under ``noop``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .collectives import all_reduce


class Compression(NamedTuple):
    """How a buffer is summed over ranks.

    Attributes:
        name: For tables.
        sends: False if nothing is communicated.
        sum_over_ranks: ``(buffer [n], group, async_op)``, in place, to a handle to wait on, or None if it is done.
    """

    name: str
    sends: bool
    sum_over_ranks: Callable[[torch.Tensor, Any, bool], Any]


def _keep(buffer: torch.Tensor, group: Any, async_op: bool) -> None:
    del buffer, group, async_op


none = Compression("none", True, all_reduce)
noop = Compression("noop", False, _keep)
