"""One backend's bandwidth over another's, at the same size on as many ranks.

Backends run one after the other, each in processes of its own. So the interval is of rounds resampled on either side:
it holds what scatters from round to round, not what changed on the machine in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..harness.ratios import compare
from ..report.published import figures

Row = Mapping[str, Any]

# XLA beside what torch has of the same kind, and NCCL beside Gloo, as in the assignment report.
PAIRS = (
    ("XLA over NCCL", "NCCL"),
    ("XLA over Gloo", "Gloo"),
    ("XLA in-process", "Gloo"),
    ("NCCL", "Gloo"),
)


class Ratio(NamedTuple):
    """How many times as much one backend sends per second as another.

    Attributes:
        asked_bytes: The size.
        value: Of the medians.
        low: Lower end of its spread: here of the 95 % interval, in the report's figures a standard deviation below.
        high: Upper end.
    """

    asked_bytes: int
    value: float
    low: float
    high: float


def ratios(rows: Iterable[Row], pair: tuple[str, str], num_ranks: int, name: str = "all_reduce") -> list[Ratio]:
    """Compares a pair of backends at every size at which both are right.

    Returns:
        The first over the second, by size.
    """
    times: dict[str, dict[int, Sequence[float]]] = {backend: {} for backend in pair}
    for row in rows:
        if row["check"] == "ok" and "rounds_ms" in row and (row["collective"], row["num_ranks"]) == (name, num_ranks):
            times.setdefault(row["backend"], {})[row["asked_bytes"]] = row["rounds_ms"]
    ours, theirs = (times[backend] for backend in pair)
    compared = {size: compare("", theirs[size], ours[size], 1.0, paired=False) for size in ours.keys() & theirs.keys()}
    return [Ratio(size, one.ratio, one.low, one.high) for size, one in sorted(compared.items())]


def report_points(backend: str, num_ranks: int) -> list[Mapping[str, Any]]:
    """Gives the report's all-reduces of a backend, by size; none if it has not measured them."""
    points = [one for one in figures()["collectives"] if (one["backend"], one["num_ranks"]) == (backend, num_ranks)]
    return sorted(points, key=lambda one: one["size_bytes"])


def report_ratios(pair: tuple[str, str], num_ranks: int) -> list[Ratio]:
    """Compares the report's backends, with the standard deviation that follows from those of the two."""
    made = []
    for ours, theirs in zip(*(report_points(backend, num_ranks) for backend in pair), strict=False):
        value = theirs["mean_ms"] / ours["mean_ms"]
        error = value * np.hypot(ours["std_ms"] / ours["mean_ms"], theirs["std_ms"] / theirs["mean_ms"])
        made.append(Ratio(ours["size_bytes"], value, value - error, value + error))
    return made
