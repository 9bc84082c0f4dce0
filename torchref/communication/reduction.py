"""The two ways to sum a bucket over ranks, and the queue of collectives in flight.

reduce           buffer on each rank     result on each rank
ALL_REDUCE       [bucket]                [bucket], the sum, in the memory of the buffer
REDUCE_SCATTER   [N, width]              [width], row r of the sum
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .collectives import all_reduce, reduce_scatter

_T = TypeVar("_T")

_MAX_IN_FLIGHT = 2


class Reduce(NamedTuple):
    """How a bucket is summed over ranks.

    Attributes:
        kind: Of the collective.
        send: ``(buffer, group, async_op) -> (what this rank keeps of the sum over ranks, handle or None)``.
        keep: ``(buffer, group) ->`` the same part of its own buffer, without communication.
    """

    kind: str
    send: Callable[[torch.Tensor, Any, bool], tuple[torch.Tensor, Any]]
    keep: Callable[[torch.Tensor, Any], torch.Tensor]


def _all_reduce(buffer: torch.Tensor, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    return buffer, all_reduce(buffer, group, async_op)


def _reduce_scatter(buffer: torch.Tensor, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    if not async_op:
        return reduce_scatter(buffer, group).view(-1), None
    row, work = reduce_scatter(buffer, group, async_op=True)
    return row.view(-1), work


ALL_REDUCE = Reduce("all-reduce", _all_reduce, lambda buffer, group: buffer)
REDUCE_SCATTER = Reduce("reduce-scatter", _reduce_scatter, lambda buffer, group: buffer[dist.get_rank(group)].clone())


class InFlight(Generic[_T]):
    """Collectives in flight, oldest first. At most two, because their buffers must stay allocated."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Any, _T, torch.Tensor]] = deque()

    def add(self, work: Any, arrival: _T, buffer: torch.Tensor) -> list[_T]:
        """Adds a collective, and waits for the oldest if there are more than two.

        ``buffer`` is what the collective reads, and is kept alive until it is done.

        Returns the arrivals of those that were waited for.
        """
        self._queue.append((work, arrival, buffer))
        return [self._next() for _ in range(len(self._queue) - _MAX_IN_FLIGHT)]

    def wait(self) -> list[_T]:
        """Waits for all; returns their arrivals."""
        return [self._next() for _ in range(len(self._queue))]

    def forget(self) -> None:
        """Drops all; the library keeps their memory until they are done."""
        self._queue.clear()

    def _next(self) -> _T:
        work, arrival, _ = self._queue.popleft()
        if work is not None:
            work.wait()
        return arrival
