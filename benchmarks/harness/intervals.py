"""Operations of a traced step, and unions of intervals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Interval = tuple[float, float]


class Event(NamedTuple):
    """An operation on a rank, as a row's ``trace`` has it; times count from the start of the step."""

    lane: str
    name: str
    phase: str
    start_ms: float
    end_ms: float


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins intervals that touch or overlap.

    Example:
        >>> merge([(3, 4), (0, 2), (1, 2.5)])
        [(0, 2.5), (3, 4)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
