"""Ratios of two times, always with an interval.

Rows with their rounds get the 95 % interval of ``benchmarks/harness/ratios.py``. Rows with only a spread get a wider
one: from one's 10th over the other's 90th percentile to the reverse.
"""

from __future__ import annotations

from typing import NamedTuple

from ..harness.ratios import compare
from ..harness.values import Row, number, rounds_ms, short, spread

_OF_ONE_PART = ("benchmark", "part", "measured_at")


class Ratio(NamedTuple):
    """A ratio of two times and its interval, which is a 95 % interval if ``is_of_rounds``."""

    value: float
    low: float
    high: float
    is_of_rounds: bool

    @property
    def is_told(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1 <= self.high

    @property
    def times(self) -> str:
        """The ratio in words."""
        return f"{_written(self.value)} times"

    @property
    def interval(self) -> str:
        """Its interval in words."""
        kind = "95 % interval" if self.is_of_rounds else "by p10 and p90"
        return f"{kind} {_written(self.low)} to {_written(self.high)}"


def ratio_of(one: Row, other: Row) -> Ratio | None:
    """Compares two rows with a time; None if the interval is unknown.

    Example:
        >>> ratio_of({"median_ms": 9.0, "rounds_ms": [9.0] * 5}, {"median_ms": 10.0, "rounds_ms": [10.0] * 5})
        Ratio(value=0.9, low=0.9, high=0.9, is_of_rounds=True)
    """
    ours, theirs = rounds_ms(one), rounds_ms(other)
    if len(ours) > 1 and len(theirs) > 1:
        # Rows of one part were timed in the same rounds, those of different parts in different processes.
        is_paired = len(ours) == len(theirs) and all(one.get(key) == other.get(key) for key in _OF_ONE_PART)
        found = compare("", ours, theirs, 1.0, paired=is_paired)
        return Ratio(found.ratio, found.low, found.high, True)
    (median, low, high), (by_median, by_low, by_high) = _spread(one), _spread(other)
    if min(median, low, high, by_median, by_low, by_high) <= 0:
        return None
    return Ratio(median / by_median, low / by_high, high / by_low, False)


def _written(value: float) -> str:
    """Formatted with three decimals, or with three digits where it is large."""
    return f"{value:.3f}" if value < 10 else short(value)


def _spread(row: Row) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of a row's time; missing ones are 0."""
    low, high = spread(row) or (0.0, 0.0)
    return number(row, "median_ms") or 0.0, low, high
