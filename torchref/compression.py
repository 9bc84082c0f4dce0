"""What travels: how a bucket's buffer becomes its sum over ranks.

``none`` sends the buffer as it is. ``noop`` sends nothing and keeps the rank's own part, which makes wrong training
and an exact baseline: exposed communication is the time of a step minus the time of the same step under ``noop``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Compression(NamedTuple):
    """How a buffer is summed over ranks.

    Attributes:
        name: For tables.
        sends: False if nothing is communicated.
        travel: ``(buffer, group, async_op, route) -> (what the rank keeps of the sum, handle)``; what is kept is there
            when the handle has been waited for, at once if it is None. The buffer may be overwritten.
    """

    name: str
    sends: bool
    travel: Callable[[torch.Tensor, Any, bool, Any], tuple[torch.Tensor, Any]]


none = Compression("none", True, lambda buffer, group, async_op, route: route.send(buffer, group, async_op))
noop = Compression("noop", False, lambda buffer, group, async_op, route: (route.keep(buffer, group), None))
