"""Bandwidth of one backend over another's, at the same size on as many ranks.

Backends run one after the other in processes of their own, so each side's rounds are resampled separately: the interval
includes noise between rounds, but not changes of the machine between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..harness.ratios import compare
from ..report.published import figures

Row = Mapping[str, Any]

# XLA against torch over the same kind of link, and NCCL against Gloo as in the assignment report.
PAIRS = (
    ("XLA over NCCL", "NCCL"), ("XLA over Gloo", "Gloo"), ("XLA in-process", "Gloo"), ("NCCL", "Gloo"),
)  # fmt: skip


class Ratio(NamedTuple):
    """A ratio of two backends' bandwidths at a size.

    Attributes:
        low: Lower end of the 95 % interval or, for the report's figures, one standard deviation below.
        high: Upper end.
    """

    asked_bytes: int
    value: float
    low: float
    high: float


def ratios(rows: Iterable[Row], pair: tuple[str, str], num_ranks: int, name: str = "all_reduce") -> list[Ratio]:
    """Compares a pair of backends at every size at which both are right: the first over the second, by size."""
    times: dict[str, dict[int, Sequence[float]]] = {backend: {} for backend in pair}
    for row in rows:
        if row["check"] == "ok" and "rounds_ms" in row and (row["collective"], row["num_ranks"]) == (name, num_ranks):
            times.setdefault(row["backend"], {})[row["asked_bytes"]] = row["rounds_ms"]
    ours, theirs = (times[backend] for backend in pair)
    compared = {size: compare("", theirs[size], ours[size], 1.0, paired=False) for size in ours.keys() & theirs.keys()}
    return [Ratio(size, one.ratio, one.low, one.high) for size, one in sorted(compared.items())]


def report_ratios(pair: tuple[str, str], num_ranks: int) -> list[Ratio]:
    """Compares the report's backends by size, with the standard deviation that follows from theirs."""
    made = []
    calls = [
        [one for one in figures()["collectives"] if (one["backend"], one["num_ranks"]) == (backend, num_ranks)]
        for backend in pair
    ]
    for ours, theirs in zip(*calls, strict=True):
        value = theirs["mean_ms"] / ours["mean_ms"]
        error = value * np.hypot(ours["std_ms"] / ours["mean_ms"], theirs["std_ms"] / theirs["mean_ms"])
        made.append(Ratio(ours["size_bytes"], value, value - error, value + error))
    return made
