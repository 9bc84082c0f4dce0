"""Sentences made from numbers. They claim a difference only where spreads or intervals show one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..harness.values import (
    Row,
    counted,
    ends,
    is_bad,
    is_not_run,
    is_sound,
    listed,
    number,
    percent,
    short,
    span,
    spread,
)
from .ratio import ratio_of

exposed_spread = partial(ends, low="exposed_p10_ms", high="exposed_p90_ms")  # of exposed communication
ENOUGH_ROUNDS = 10  # the fewest of a gate


def is_apart(one: Row, other: Row) -> bool:
    """Whether a run shows a difference between two times.

    It does if the 95 % interval of the ratio of their rounds excludes 1. Without rounds, each median has to lie outside
    the other's 10th to 90th percentile.

    Example:
        >>> narrow = {"median_ms": 10.0, "p10_ms": 9.0, "p90_ms": 11.0}
        >>> is_apart(narrow, {"median_ms": 12.0, "p10_ms": 10.5, "p90_ms": 13.0})
        True
        >>> is_apart(narrow, {"median_ms": 12.0, "p10_ms": 9.5, "p90_ms": 13.0})
        False
    """

    def is_outside(row: Row, other: Row) -> bool:
        median, low_high = number(row, "median_ms"), spread(other)
        return median is not None and low_high is not None and not low_high[0] <= median <= low_high[1]

    ratio = ratio_of(one, other)
    if ratio is not None and ratio.is_of_rounds:
        return ratio.is_told
    return is_outside(one, other) and is_outside(other, one)


def timed(rows: Sequence[Row]) -> list[Row]:
    """The sound rows that have a time, the shortest first."""
    with_time = [row for row in rows if is_sound(row) and (number(row, "median_ms") or 0) > 0]
    return sorted(with_time, key=lambda row: row["median_ms"])


def time_of(row: Row) -> str:
    """A row's time with its spread, in words."""
    low_high = spread(row)
    return f"{short(row['median_ms'])} ms" + (f" (p10{_DASH}p90 {span(low_high)})" if low_high else "")


def extremes(rows: Sequence[Row], name: Callable[[Row], str], what: str) -> str:
    """A sentence on the shortest and the longest time, and whether they differ; empty if there are not two."""
    ordered = timed(rows)
    if len(ordered) < 2:
        return ""
    first, last = ordered[0], ordered[-1]
    if not is_apart(first, last):
        return (
            f"the {what} of {name(first)} is the shortest, {time_of(first)}, and that of {name(last)} the longest,"
            f" {time_of(last)}, but the spreads do not tell them apart."
        )
    alike = [row for row in ordered[1:] if not is_apart(first, row)]
    besides = f"; {listed([name(row) for row in alike])} cannot be told from it" if alike else ""
    ratio = ratio_of(last, first)
    as_long = f": {ratio.times} as long ({ratio.interval})" if ratio else ""
    return (
        f"the {what} of {name(first)} is the shortest, {time_of(first)}{besides}. The longest is that of {name(last)},"
        f" {time_of(last)}{as_long}."
    )


def exposure(rows: Sequence[Row], name: Callable[[Row], str]) -> str:
    """A sentence on the least and the most exposed communication of some steps."""
    shares = sorted(
        ((share, row) for row in timed(rows) if (share := exposed_share(row)) is not None), key=lambda one: one[0]
    )
    if not shares:
        return ""
    (least, first), (most, last) = shares[0], shares[-1]
    if most <= 0:
        return "No step took longer than without its communication."
    high = f"{percent(most)}{_share_spread(last)}"
    if len(shares) == 1:
        return f"{high} of it is exposed communication{_unseen(last)}."
    low = f"{percent(max(least, 0.0))}{_share_spread(first)}"
    both = f"{low} of the step of {name(first)} and {high} of that of {name(last)}"
    return f"Exposed communication is {both}{_unseen(last)}."


def exposed_share(row: Row) -> float | None:
    """Exposed communication as a share of the step; noise can make it slightly negative."""
    exposed, median = number(row, "exposed_ms"), number(row, "median_ms")
    return None if exposed is None or not median else exposed / median


def _share_spread(row: Row) -> str:
    """The spread of exposed communication as a share of the step, in words; empty if unknown."""
    low_high, median = exposed_spread(row), number(row, "median_ms")
    if low_high is None or not median:
        return ""
    return f" (p10{_DASH}p90 {percent(low_high[0] / median)} to {percent(low_high[1] / median)})"


def _unseen(row: Row) -> str:
    low_high = exposed_spread(row)
    return ", which its spread does not tell from none" if low_high is not None and low_high[0] <= 0 else ""


def few_rounds(rows: Sequence[Row]) -> str:
    """A warning about spreads of few rounds; empty if all rows have enough, or do not record them."""
    counts = [rounds for row in timed(rows) for key in ("num_timed", "num_rounds") if (rounds := number(row, key))]
    if not counts or min(counts) >= ENOUGH_ROUNDS:
        return ""
    return f"A time here is of {min(counts):.0f} rounds: the spread of fewer than {ENOUGH_ROUNDS} proves little."


def left_out(rows: Sequence[Row]) -> str:
    """A sentence on the number of rows that no sentence includes; empty if all are sound."""
    bad, missing = sum(map(is_bad, rows)), sum(map(is_not_run, rows))
    said = [f"{bad} failed or {'is' if bad == 1 else 'are'} wrong"] if bad else []
    said += [f"{missing} {'was' if missing == 1 else 'were'} not run"] if missing else []
    return f"Of {counted(len(rows), 'row')} {listed(said)}; no sentence here counts them." if said else ""


def of_group(group: str, sentence: str) -> str:
    """Puts the subject before a sentence; empty if there is no sentence."""
    return f"{group}: {sentence}" if sentence else ""


_DASH = "\N{EN DASH}"
