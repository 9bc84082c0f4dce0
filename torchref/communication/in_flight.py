"""The queue of collectives in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_MAX_IN_FLIGHT = 2


class InFlight:
    """Collectives in flight, oldest first. At most two, because their buffers must stay allocated."""

    def __init__(self, on_arrival: Callable[..., None]) -> None:
        """``on_arrival`` gets what was added with each collective, once that is done."""
        self._on_arrival = on_arrival
        self._queue: deque[tuple[Any, tuple[Any, ...], torch.Tensor]] = deque()

    def add(self, work: Any, buffer: torch.Tensor, *arrival: Any) -> None:
        """Adds a collective, which reads ``buffer``, and waits for the oldest if there are more than two."""
        self._queue.append((work, arrival, buffer))
        self.wait(_MAX_IN_FLIGHT)

    def wait(self, num_left: int = 0) -> None:
        """Waits for all but the newest."""
        while len(self._queue) > num_left:
            work, arrival, _ = self._queue.popleft()
            if work is not None:
                work.wait()
            self._on_arrival(*arrival)

    def forget(self) -> None:
        """Drops all; the library keeps their memory until they are done."""
        self._queue.clear()
