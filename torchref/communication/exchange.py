"""How buffers travel: the two routes of a bucket, and what is under way.

Every strategy sums its buckets over ranks; they differ in what a rank keeps of the sum: all of it (all-reduce), or the
part that it owns (reduce-scatter).

    route    buffer on each rank     a rank keeps
    WHOLE    [bucket]                [bucket], the sum, in place of the buffer
    SHARDED  [N, width]              [width], row r of the sum
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


class Route(NamedTuple):
    """How a bucket's buffer travels.

    Attributes:
        kind: Of the collective.
        send: ``(buffer, group, async_op) -> (what this rank keeps of the sum over ranks, handle or None)``.
        keep: The same of its own buffer, without communication.
    """

    kind: str
    send: Callable[[torch.Tensor, Any, bool], tuple[torch.Tensor, Any]]
    keep: Callable[[torch.Tensor, Any], torch.Tensor]


def _send_whole(buffer: torch.Tensor, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    return buffer, all_reduce(buffer, group, async_op)


def _send_sharded(buffer: torch.Tensor, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    if not async_op:
        return reduce_scatter(buffer, group).view(-1), None
    own, work = reduce_scatter(buffer, group, async_op=True)
    return own.view(-1), work


WHOLE = Route("all-reduce", _send_whole, lambda buffer, group: buffer)
SHARDED = Route("reduce-scatter", _send_sharded, lambda buffer, group: buffer[dist.get_rank(group)].clone())


class InFlight(Generic[_T]):
    """Collectives under way, oldest first, and at most two: what they read and write must stay, and that is memory."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._queue: deque[tuple[Any, _T, torch.Tensor]] = deque()

    def add(self, work: Any, arrival: _T, buffer: torch.Tensor) -> list[_T]:
        """Takes in a collective that was just launched.

        Args:
            work: Its handle; None if it is done.
            arrival: What to hand out when it is done.
            buffer: What it reads.

        Returns:
            What had to arrive to make room.
        """
        self._queue.append((work, arrival, buffer))
        return [self._next() for _ in range(len(self._queue) - _MAX_IN_FLIGHT)]

    def wait(self) -> list[_T]:
        """Waits until nothing is under way.

        Returns:
            What arrived.
        """
        return [self._next() for _ in range(len(self._queue))]

    def forget(self) -> None:
        """Drops what is under way; the library keeps the memory until it is done."""
        self._queue.clear()

    def _next(self) -> _T:
        work, arrival, _ = self._queue.popleft()
        if work is not None:
            work.wait()
        return arrival
