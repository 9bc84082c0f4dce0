"""Simulated steps as a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each strategy is a process, with a thread for compute and one for communication. Each operation that takes
time is an event; gaps between compute events are waits.

References:
    Chrome's Trace Event Format: complete events (``"ph": "X"``) and metadata (``"ph": "M"``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .simulate import Simulation, Span

_THREADS = {"compute": 1, "communication": 2}


def write_trace(simulations: Mapping[str, Simulation], path: str | Path) -> None:
    """Writes steps as a trace file, one process per step.

    The same simulations give the same bytes.

    Raises:
        ValueError: If there is no simulation.
    """
    if not simulations:
        raise ValueError("simulations (={}) must hold at least one to write")
    events = [
        event
        for process, (label, simulation) in enumerate(simulations.items(), start=1)
        for event in _process_events(process, label, simulation)
    ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))


def _process_events(process: int, label: str, simulation: Simulation) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process, 0, name=label)
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    threads = {"compute": 1} | {span.lane: _THREADS[span.lane] for span in simulation.spans}
    for lane, thread in threads.items():
        yield _metadata("thread_name", process, thread, name=lane)
    for thread in threads.values():
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)
    for span in simulation.spans:
        yield _complete(span, process)


def _metadata(name: str, process: int, thread: int, /, **args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


def _complete(span: Span, process: int) -> dict[str, Any]:
    # Perfetto drops overlapping events and rounds starts and durations separately to nanoseconds. Rounding here makes
    # each event end where the next begins.
    start_ns, end_ns = round(span.start_s * 1e9), round(span.end_s * 1e9)
    args = {"phase" if span.lane == "compute" else "kind": span.kind, "bytes": span.num_bytes, "op_name": span.op_name}
    return {
        "name": span.name,
        "cat": f"{span.lane},{span.kind}",
        "ph": "X",
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "pid": process,
        "tid": _THREADS[span.lane],
        "args": args,
    }
