"""Sums of gradients over ranks, of which each rank gets its shards."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

MAX_IN_FLIGHT = 2


class ShardSums:
    """Reduce-scatters in flight, and what has arrived of them: sums over ranks and over backwards, by name.

    At most two are in flight, because their buffers must stay allocated.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Any, torch.Tensor | None, dict[str, torch.Tensor]]] = deque()
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, parts: dict[str, torch.Tensor], work: Any = None, buffer: torch.Tensor | None = None) -> None:
        """Adds what a reduce-scatter of ``buffer`` writes, or what is there already."""
        self._queue.append((work, buffer, parts))
        self.wait(MAX_IN_FLIGHT)

    def wait(self, num_left: int = 0) -> None:
        """Waits for all but the newest."""
        while len(self._queue) > num_left:
            work, _, parts = self._queue.popleft()
            if work is not None:
                work.wait()
            for name, part in parts.items():
                self._sums[name] = self._sums[name].add_(part) if name in self._sums else part

    def means(self, denominator: Any) -> dict[str, torch.Tensor]:
        """Waits for all, and divides; the next sums start from nothing."""
        self.wait()
        means, self._sums = self._sums, {}
        if means:
            torch._foreach_div_(list(means.values()), denominator)
        return means

    def forget(self, name: str | None = None) -> None:
        """Drops what has arrived of one, or everything; the library keeps memory in flight until it is done."""
        if name is not None:
            self._sums.pop(name, None)
        else:
            self._queue.clear()
            self._sums = {}
