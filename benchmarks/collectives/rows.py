"""The rows of calls: a collective at a size on one backend each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxddp.training.clock import summarize

from ..harness.run import FAILED, NOT_RUN
from .cases import NAMES, check, rates
from .interleaving import Timed


def rows_of(of_processes: Sequence[Sequence[Timed]], num_ranks: int) -> list[dict[str, Any]]:
    """Joins what the processes of a backend found: a call takes as long as on its slowest rank."""
    rows = []
    for of_ranks in zip(*of_processes, strict=True):
        first = of_ranks[0]
        row: dict[str, Any] = {"collective": first.name, "asked_bytes": first.asked_bytes}
        if first.failed:
            rows.append(row | {"check": f"{FAILED}{first.failed}"})
            continue
        seconds = [max(times) for times in zip(*(one.seconds for one in of_ranks), strict=True)]
        timings = summarize(seconds)
        algbw, busbw = rates(first.name, first.size_bytes, timings.median_ms * 1e-3, num_ranks)
        row |= {"size_bytes": first.size_bytes, **timings._asdict(), "num_rounds": len(seconds)}
        row |= {"algbw_gb_per_s": algbw, "busbw_gb_per_s": busbw, "kernel": first.kernel}
        row |= {"planned": first.planned, "compiled": first.found}
        row["check"] = check(first.planned, first.found, sum(one.wrong for one in of_ranks))
        row["rounds_ms"] = [float(f"{each * 1e3:.5g}") for each in seconds]
        rows.append(row)
    return rows


def in_order(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sorts rows of one backend: first what was not run, then by collective and size."""

    def place(row: Mapping[str, Any]) -> tuple[bool, int, int]:
        return not row["check"].startswith(NOT_RUN), NAMES.index(row["collective"]), row["asked_bytes"]

    return sorted(rows, key=place)
