"""Timelines of a step in both frameworks, for two strategies that differ in when they communicate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..harness.console import progress_of
from ..harness.intervals import Event
from ..harness.run import Run
from ..report.lanes import busy_ms
from ..training.measure import TrainingSetup, ranks_in_words
from . import jax_side, torch_side
from .overlap import COMPUTE, overlap_of, shorten

STRATEGIES = ("naive", "overlapped")
FOLDER = "traces"
GAP_SHARE = 1 / 500  # of a step; operations of a phase with smaller gaps are joined


def record(this: Run, setup: TrainingSetup) -> None:
    """Records traces of both frameworks into the run's folder, and reads them into rows; each framework is a part."""
    folder = this.folder / FOLDER
    folder.mkdir(exist_ok=True)

    def measure(framework: str) -> Iterator[dict[str, Any]]:
        side = jax_side.run if framework == "jaxddp" else torch_side.run
        start = setup.ranks.run_jax if framework == "jaxddp" else setup.ranks.run_torch
        with progress_of(this.console, framework) as show:
            of_ranks = start(side, setup, STRATEGIES, str(folder.resolve()), on_message=show)
        for name, (events, planned) in of_ranks[0].items():
            yield _identity(setup, framework, name) | trace_fields(events, planned)

    for framework in ("jaxddp", "torchref"):
        this.part(f"{framework} traces", lambda framework=framework: measure(framework))  # type: ignore[misc]


def trace_fields(events: Sequence[Event], num_planned: int) -> dict[str, Any]:
    """The fields of a trace's row: events, overlap, and how long was computed and communicated."""
    computed, sent = ([one for one in events if (one.lane == COMPUTE) is is_compute] for is_compute in (True, False))
    traced_ms = max((one.end_ms for one in events), default=0.0)
    return {
        "traced_ms": traced_ms,
        "compute_ms": busy_ms(computed),
        "communication_ms": busy_ms(sent),
        "overlap_share": overlap_of(events),
        "trace": [_rounded(one) for one in shorten(events, traced_ms * GAP_SHARE)],
        "check": "ok" if len(sent) == num_planned else f"WRONG: {num_planned} collectives planned, {len(sent)} traced",
    }


def _identity(setup: TrainingSetup, framework: str, name: str) -> dict[str, Any]:
    kind, words = ranks_in_words(setup.ranks, framework)
    return {
        "framework": framework,
        "backend": setup.ranks.backend[framework],
        "strategy": name,
        "model": setup.model,
        "num_ranks": setup.ranks.num,
        "kind": kind,
        "ranks": words,
        "global_batch": setup.global_batch,
        "trace_of": f"{Path(FOLDER) / framework}-{name}, rank 0",
    }


def _rounded(event: Event) -> dict[str, Any]:
    return event._asdict() | {"start_ms": round(event.start_ms, 4), "end_ms": round(event.end_ms, 4)}
