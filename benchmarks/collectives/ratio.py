"""Bandwidth of one backend over another's, at the same size on as many ranks.

Backends run one after the other in processes of their own, so each side's rounds are resampled separately: the interval
includes noise between rounds, but not changes of the machine between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..harness.ratios import compare
from ..harness.values import Row, check, number, rounds_ms, text
from ..report.published import figures

# XLA against torch over the same kind of link, and NCCL against Gloo as in the assignment report.
PAIRS = (
    ("XLA over NCCL", "NCCL"), ("XLA over Gloo", "Gloo"), ("XLA in-process", "Gloo"), ("NCCL", "Gloo"),
)  # fmt: skip


def ratios(rows: Iterable[Row], pair: tuple[str, str], num_ranks: int) -> list[Row]:
    """Compares all-reduces of a pair of backends at every size at which both are right: the first over the second."""
    times: dict[str, dict[float, Sequence[float]]] = {backend: {} for backend in pair}
    for row in rows:
        asked_bytes, times_ms = number(row, "asked_bytes"), rounds_ms(row)
        is_all_reduce = (row.get("collective"), row.get("num_ranks")) == ("all_reduce", num_ranks)
        if check(row) == "ok" and asked_bytes and times_ms and is_all_reduce:
            times.setdefault(text(row, "backend"), {})[asked_bytes] = times_ms
    ours, theirs = (times[backend] for backend in pair)
    compared = {size: compare("", theirs[size], ours[size], 1.0, paired=False) for size in ours.keys() & theirs.keys()}
    return [_row(size, one.ratio, one.low, one.high) for size, one in sorted(compared.items())]


def report_ratios(pair: tuple[str, str], num_ranks: int) -> list[Row]:
    """Compares the report's backends by size; the interval is one standard deviation to either side."""
    found, calls = [], figures()["collectives"]
    sides = [[one for one in calls if (one["backend"], one["num_ranks"]) == (backend, num_ranks)] for backend in pair]
    for ours, theirs in zip(*sides, strict=True):
        value = theirs["mean_ms"] / ours["mean_ms"]
        error = value * np.hypot(ours["std_ms"] / ours["mean_ms"], theirs["std_ms"] / theirs["mean_ms"])
        found.append(_row(ours["size_bytes"], value, value - error, value + error))
    return found


def _row(size_bytes: float, ratio: float, low: float, high: float) -> Row:
    return {"size_bytes": size_bytes, "ratio": ratio, "low": low, "high": high, "check": ""}
