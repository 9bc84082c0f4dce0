"""Operations of a traced step, and the union of intervals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Interval = tuple[float, float]


class Event(NamedTuple):
    """An operation that ran on a rank; its fields are those of a row's ``trace``.

    Attributes:
        lane: What the rank did: compute or communicate.
        name: Of the operation.
        phase: Of the step, such as forward.
        start_ms: From the start of the step.
        end_ms: Likewise.
    """

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
