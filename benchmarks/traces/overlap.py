"""Overlap of communication and computation in a trace, defined in the same way for both frameworks.

    overlap = |union(communication) and union(compute)| / |union(communication)|

Intervals are merged first, so concurrent and nested operations count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..harness.intervals import Event, Interval, merge

COMPUTE, COMMUNICATION = "compute", "communication"
SYNC = "gradient sync"


def overlap_share(communication: Iterable[Interval], compute: Iterable[Interval]) -> float | None:
    """The share of communication time in which something is computed; None if nothing communicates.

    Example:
        >>> overlap_share([(0, 4)], [(1, 2), (1.5, 3)])
        0.5
    """
    ours, theirs = merge(communication), merge(compute)
    total = sum(end - start for start, end in ours)
    shared = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in ours
        for other_start, other_end in theirs
    )
    return shared / total if total > 0 else None


def overlap_of(events: Sequence[Event]) -> float | None:
    """The overlap of a rank's step."""
    lanes = {lane: [(one.start_ms, one.end_ms) for one in events if one.lane == lane] for lane in _LANES}
    return overlap_share(lanes[COMMUNICATION], lanes[COMPUTE])


def shorten(events: Sequence[Event], gap_ms: float) -> list[Event]:
    """Joins successive operations of one phase with small gaps, except communication; sorted by start."""
    kept = [event for event in events if event.lane == COMMUNICATION]
    runs: list[list[Event]] = []
    for event in sorted((one for one in events if one.lane == COMPUTE), key=lambda one: one.start_ms):
        last = runs[-1] if runs else []
        reached = max((one.end_ms for one in last), default=-1.0)
        if last and last[0].phase == event.phase and event.start_ms <= reached + gap_ms:
            last.append(event)
        else:
            runs.append([event])
    for run in runs:
        name = run[0].name if len(run) == 1 else f"{len(run)} operations"
        kept.append(run[0]._replace(name=name, end_ms=max(one.end_ms for one in run)))
    return sorted(kept, key=lambda one: one.start_ms)


_LANES = (COMPUTE, COMMUNICATION)
