"""Simulated steps as a picture, and as a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each strategy is a row, or a process, with a lane for compute, coloured by phase, and one for communication. A gap in
compute is a wait for communication. All strategies share one time axis.

References:
    Chrome's Trace Event Format: complete events (``"ph": "X"``) and metadata (``"ph": "M"``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..communication.buckets import describe_collectives
from ..scopes import METRICS_SCOPE
from .schedule import PHASES
from .simulate import Simulation, Span

# Okabe and Ito's colour-blind safe palette.
_COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#009e73",
    "all-reduce": "#e69f00",
    "reduce-scatter": "#f0e442",
    "all-gather": "#cc79a7",
}
_INK, _GRAY, _EXPOSED_INK = "#222222", "#666666", "#a84a00"
_WAIT: dict[str, Any] = {"facecolor": "#fbdcc8", "edgecolor": "#d55e00", "hatch": "//////", "linewidth": 0}
_BACKWARD_ENDS: dict[str, Any] = {"color": _INK, "linewidth": 1.2, "linestyle": (0, (3, 2))}

# In inches; lanes from the top of their row.
_FIGURE_WIDTH, _LEFT, _RIGHT, _ROW, _TITLE, _FOOT, _LEGEND_ROW = 10.0, 1.2, 1.35, 1.12, 0.42, 0.63, 0.2
_LABEL_Y, _COMPUTE_Y, _COMMUNICATION_Y = 0.2, (0.3, 0.66), (0.69, 0.97)
_THREADS = {"compute": 1, "communication": 2}


def draw(simulations: Mapping[str, Simulation], path: str | Path, *, title: str = "") -> None:
    """Draws steps below each other on one time axis, labelled by their keys. The same simulations give the same bytes.

    Raises:
        ValueError: If there is no simulation, one takes no time, or the path is neither a PNG nor an SVG.
    """
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"path (={str(path)!r}) must end in .png or .svg")
    if not simulations:
        raise ValueError("simulations (={}) must hold at least one to draw")
    for simulation in simulations.values():
        if not simulation.step_s > 0:
            raise ValueError(f"step_s (={simulation.step_s}) must be over 0: the program holds nothing that takes time")

    import matplotlib
    from matplotlib.figure import Figure

    longest_ms = max(simulation.step_s for simulation in simulations.values()) * 1e3
    digits = max(0, 2 - math.floor(math.log10(longest_ms)))
    handles = _legend([span for simulation in simulations.values() for span in simulation.spans])
    num_legend_rows = 1 if len(handles) < 8 else 2
    foot = _FOOT + _LEGEND_ROW * num_legend_rows
    height = (_TITLE if title else 0.1) + _ROW * len(simulations) + foot
    settings: Any = {"svg.hashsalt": "jaxddp", "svg.fonttype": "none", "hatch.linewidth": 0.8}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_FIGURE_WIDTH, height))
        width = 1 - (_LEFT + _RIGHT) / _FIGURE_WIDTH
        axes = figure.add_axes((_LEFT / _FIGURE_WIDTH, foot / height, width, _ROW * len(simulations) / height))
        axes.set_xlim(0, longest_ms)
        axes.set_ylim(_ROW * len(simulations), 0)
        for index, (label, simulation) in enumerate(simulations.items()):
            _draw_row(axes, index * _ROW, label, simulation, digits)
        lanes = [(sum(y) / 2, name) for y, name in ((_COMPUTE_Y, "compute"), (_COMMUNICATION_Y, "communication"))]
        ticks = [(index * _ROW + y, name) for index in range(len(simulations)) for y, name in lanes]
        axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
        axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=_GRAY)
        axes.tick_params(axis="x", labelsize=9, color=_GRAY, labelcolor=_INK)
        axes.grid(axis="x", color="#e3e3e3", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_GRAY)
        axes.set_xlabel("time in the step (ms)", fontsize=9, color=_INK)
        ncols = math.ceil(len(handles) / num_legend_rows)
        figure.legend(handles=handles, loc="lower center", ncols=ncols, frameon=False, fontsize=9, columnspacing=1.4)
        if title:
            y = 1 - 0.12 / height
            figure.text(0.012, y, title, fontsize=12, weight="bold", color=_INK, va="top", parse_math=False)
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _draw_row(axes: Any, top: float, label: str, simulation: Simulation, digits: int) -> None:
    compute, communication = ([span for span in simulation.spans if span.lane == lane] for lane in _THREADS)
    low, high = (top + y for y in _COMPUTE_Y)
    # snap=False: short pieces would be rounded to one pixel or to none.
    for phase, pieces in _merged(compute).items():
        axes.broken_barh(_in_ms(pieces), (low, high - low), facecolor=_COLORS[phase], linewidth=0, snap=False)
    starts = [*(span.start_s for span in compute), simulation.step_s]
    ends = [0.0, *(span.end_s for span in compute)]
    waits = [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
    axes.broken_barh(_in_ms(waits), (low, high - low), **_WAIT, snap=False)

    low, high = (top + y for y in _COMMUNICATION_Y)
    for kind in dict.fromkeys(span.kind for span in communication):
        pieces = [(span.start_s, span.end_s) for span in communication if span.kind == kind]
        axes.broken_barh(_in_ms(pieces), (low, high - low), **_collective(kind))

    step_ms = simulation.step_s * 1e3
    axes.vlines(step_ms, top + _COMPUTE_Y[0], high, color=_INK, linewidth=1.2, clip_on=False)
    backward_ends = [span.end_s for span in compute if span.kind == "backward"]
    if backward_ends:
        axes.vlines(max(backward_ends) * 1e3, top + 0.22, high + 0.06, **_BACKWARD_ENDS, clip_on=False)

    y = top + _LABEL_Y
    name = axes.annotate(label, (0, y), fontsize=11, weight="bold", color=_INK, parse_math=False)
    counted = [(span.kind, span.num_bytes) for span in communication if METRICS_SCOPE not in span.op_name]
    if counted:
        beside = {"xycoords": (name, "data"), "textcoords": "offset points", "fontsize": 9, "color": _GRAY}
        axes.annotate(describe_collectives(counted), (1, y), (8, 0), **beside)
    at_end = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    y = top + sum(_COMPUTE_Y) / 2
    axes.annotate(f"{step_ms:,.{digits}f} ms", (step_ms, y), (6, 0), **at_end, fontsize=11, weight="bold", color=_INK)
    y = top + sum(_COMMUNICATION_Y) / 2
    exposed = f"exposed {simulation.exposed_s * 1e3:,.{digits}f} ms"
    axes.annotate(exposed, (step_ms, y), (6, 0), **at_end, fontsize=9, color=_EXPOSED_INK)


def _merged(spans: list[Span]) -> dict[str, list[tuple[float, float]]]:
    """Start and end of each run of spans of one kind without a gap, by kind."""
    merged: dict[str, list[tuple[float, float]]] = {}
    last = ""
    for span in spans:
        pieces = merged.setdefault(span.kind, [])
        if span.kind == last and pieces[-1][1] >= span.start_s:
            pieces[-1] = (pieces[-1][0], span.end_s)
        else:
            pieces.append((span.start_s, span.end_s))
        last = span.kind
    return merged


def _in_ms(pieces: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(start * 1e3, (end - start) * 1e3) for start, end in pieces]


def _legend(spans: list[Span]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    phases = {span.kind for span in spans if span.lane == "compute"}
    handles: list[Any] = [Patch(facecolor=_COLORS[phase], label=phase) for phase in PHASES if phase in phases]
    handles.append(Patch(**_WAIT, label="waiting (exposed)"))
    kinds = dict.fromkeys(span.kind for span in spans if span.lane == "communication")
    handles += [Patch(**_collective(kind), label=kind) for kind in kinds]
    return handles + ([Line2D([], [], **_BACKWARD_ENDS, label="backward ends")] if "backward" in phases else [])


def _collective(kind: str) -> dict[str, Any]:
    return {"facecolor": _COLORS.get(kind, "#999999"), "edgecolor": _INK, "linewidth": 0.3}


def write_trace(simulations: Mapping[str, Simulation], path: str | Path) -> None:
    """Writes steps as a trace file, one process per step. The same simulations give the same bytes.

    Raises:
        ValueError: If there is no simulation.
    """
    if not simulations:
        raise ValueError("simulations (={}) must hold at least one to write")
    processes = enumerate(simulations.items(), start=1)
    events = [event for process, named in processes for event in _process_events(process, *named)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))


def _process_events(process: int, label: str, simulation: Simulation) -> Iterator[dict[str, Any]]:
    def metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}

    yield metadata("process_name", 0, name=label)
    yield metadata("process_sort_index", 0, sort_index=process)
    for lane, thread in _THREADS.items():
        yield metadata("thread_name", thread, name=lane)
        yield metadata("thread_sort_index", thread, sort_index=thread)
    for span in simulation.spans:
        # Perfetto drops overlapping events and rounds starts and durations separately to nanoseconds. Rounding here
        # makes each event end where the next begins.
        start_ns, end_ns = round(span.start_s * 1e9), round(span.end_s * 1e9)
        what = "phase" if span.lane == "compute" else "kind"
        yield {
            "name": span.name,
            "cat": f"{span.lane},{span.kind}",
            "ph": "X",
            "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "pid": process,
            "tid": _THREADS[span.lane],
            "args": {what: span.kind, "bytes": span.num_bytes, "op_name": span.op_name},
        }
