"""The queue of collectives in flight."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

import torch

_T = TypeVar("_T")

_MAX_IN_FLIGHT = 2


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
