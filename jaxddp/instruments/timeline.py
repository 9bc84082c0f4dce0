"""Simulated steps as a picture with two lanes per strategy, and as one line of text.

The upper lane is compute, coloured by phase; a gap is a wait for communication. The lower lane is communication, with
one row per stream. All strategies share one time axis.

Simulated steps as a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each strategy is a process, with a thread for compute and one for communication. Each operation that takes
time is an event; gaps between compute events are waits.

References:
    Chrome's Trace Event Format: complete events (``"ph": "X"``) and metadata (``"ph": "M"``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..scopes import METRICS_SCOPE
from .schedule import PHASES, describe_collectives
from .simulate import Simulation, Span

ONE_LINE_LEGEND = (
    "f forward  b backward  o optimizer; F B O the same with communication in flight; # waiting for communication"
)
MIN_WIDTH = 10

_WAITING = "#"
_GLYPHS = "fFbBoO" + _WAITING

# Okabe and Ito's colour-blind safe palette.
_COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#009e73",
    "all-reduce": "#e69f00",
    "reduce-scatter": "#f0e442",
    "all-gather": "#cc79a7",
}
_OTHER_COLLECTIVE = "#999999"
_INK, _GRAY, _EXPOSED_INK = "#222222", "#666666", "#a84a00"
_WAIT: dict[str, Any] = {"facecolor": "#fbdcc8", "edgecolor": "#d55e00", "hatch": "//////", "linewidth": 0}
_BACKWARD_ENDS: dict[str, Any] = {"color": _INK, "linewidth": 1.2, "linestyle": (0, (3, 2))}

# In inches; lanes from the top of their row.
_FIGURE_WIDTH, _LEFT, _RIGHT, _ROW, _TITLE, _FOOT, _LEGEND_ROW = 10.0, 1.2, 1.35, 1.12, 0.42, 0.63, 0.2
_LABEL_Y, _COMPUTE_Y, _COMMUNICATION_Y = 0.2, (0.3, 0.66), (0.69, 0.97)


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
        _check_takes_time(simulation)

    import matplotlib
    from matplotlib.figure import Figure

    longest_ms = max(simulation.step_s for simulation in simulations.values()) * 1e3
    digits = 0 if longest_ms >= 100 else 1 if longest_ms >= 10 else 2 if longest_ms >= 1 else 3
    handles = _legend(simulations.values())
    num_legend_rows = 1 if len(handles) < 8 else 2
    foot = _FOOT + _LEGEND_ROW * num_legend_rows
    height = (_TITLE if title else 0.1) + _ROW * len(simulations) + foot
    settings: Any = {"svg.hashsalt": "jaxddp", "svg.fonttype": "none", "hatch.linewidth": 0.8}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_FIGURE_WIDTH, height), facecolor="white")
        width = 1 - (_LEFT + _RIGHT) / _FIGURE_WIDTH
        axes = figure.add_axes((_LEFT / _FIGURE_WIDTH, foot / height, width, _ROW * len(simulations) / height))
        axes.set_xlim(0, longest_ms)
        axes.set_ylim(_ROW * len(simulations), 0)
        for index, (label, simulation) in enumerate(simulations.items()):
            _draw_row(axes, index * _ROW, label, simulation, digits)
        tops = [index * _ROW for index in range(len(simulations))]
        lanes = [(sum(y) / 2, name) for y, name in ((_COMPUTE_Y, "compute"), (_COMMUNICATION_Y, "communication"))]
        axes.set_yticks([top + y for top in tops for y, _ in lanes], [name for _ in tops for _, name in lanes])
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


def one_line(simulation: Simulation, width: int = 72) -> str:
    """Renders a step as one line of ASCII; each column is an equal slice of its time.

    A column shows one activity of its slice. What is not shown accumulates and appears in a later column, so activities
    shorter than a column are represented too. ``ONE_LINE_LEGEND`` explains the characters.

    Raises:
        ValueError: If the width is too small, or the step takes no time.

    Example:
        >>> from jaxddp.instruments.simulate import Simulation, Span
        >>> compute = Span("f", "compute", "forward", 0, 3, 64), Span("b", "compute", "backward", 3, 9, 64)
        >>> reduction = Span("all-reduce.1", "communication", "all-reduce", 6, 12, 1024)
        >>> one_line(Simulation((*compute, reduction), 12, compute_s=9, communication_s=6, exposed_s=3), width=24)
        'ffffffbbbbbbBBBBBB######'
    """
    if width < MIN_WIDTH:
        raise ValueError(f"width (={width}) must be at least {MIN_WIDTH} columns")
    _check_takes_time(simulation)
    line = ""
    unshown = np.zeros(len(_GLYPHS))
    for shares in _shares(simulation, width):
        unshown += shares
        # Rounded, so that floating-point noise does not change the character between machines.
        line += _GLYPHS[int(np.argmax(np.where(shares > 1e-6, unshown.round(6), -np.inf)))]
        unshown[_GLYPHS.index(line[-1])] -= 1
    return line


def _shares(simulation: Simulation, width: int) -> np.ndarray:
    """Share of each column's slice that belongs to each of ``_GLYPHS``, ``[width, glyphs]``."""
    compute, communication = _lanes(simulation)
    step_s = simulation.step_s
    times = [time for span in simulation.spans for time in (span.start_s, span.end_s)]
    edges = np.unique(np.concatenate([times, np.linspace(0, step_s, width + 1)]))
    middles = (edges[1:] + edges[:-1]) / 2
    in_flight = _is_covered(middles, communication)
    glyphs = np.full(len(middles), _GLYPHS.index(_WAITING))
    for index, phase in enumerate(PHASES):
        is_in_phase = _is_covered(middles, [span for span in compute if span.kind == phase])
        glyphs[is_in_phase] = 2 * index + in_flight[is_in_phase]
    shares = np.zeros((width, len(_GLYPHS)))
    columns = np.minimum((middles / step_s * width).astype(int), width - 1)
    np.add.at(shares, (columns, glyphs), np.diff(edges) / step_s * width)
    return shares


def _is_covered(times_s: np.ndarray, spans: list[Span]) -> np.ndarray:
    starts = np.sort([span.start_s for span in spans])
    ends = np.sort([span.end_s for span in spans])
    return np.searchsorted(starts, times_s) > np.searchsorted(ends, times_s)


def _draw_row(axes: Any, top: float, label: str, simulation: Simulation, digits: int) -> None:
    compute, communication = _lanes(simulation)
    low, high = (top + y for y in _COMPUTE_Y)
    # snap=False: short pieces would be rounded to one pixel or to none.
    for phase, pieces in _merged(compute).items():
        axes.broken_barh(_in_ms(pieces), (low, high - low), facecolor=_COLORS[phase], linewidth=0, snap=False)
    waits = _in_ms(_waits(compute, simulation.step_s))
    axes.broken_barh(waits, (low, high - low), **_WAIT, snap=False)

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


def _waits(compute: list[Span], step_s: float) -> list[tuple[float, float]]:
    starts = [*(span.start_s for span in compute), step_s]
    ends = [0.0, *(span.end_s for span in compute)]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def _in_ms(pieces: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(start * 1e3, (end - start) * 1e3) for start, end in pieces]


def _legend(simulations: Iterable[Simulation]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    spans = [span for simulation in simulations for span in simulation.spans]
    phases = {span.kind for span in spans if span.lane == "compute"}
    handles: list[Any] = [Patch(facecolor=_COLORS[phase], label=phase) for phase in PHASES if phase in phases]
    handles.append(Patch(**_WAIT, label="waiting (exposed)"))
    kinds = dict.fromkeys(span.kind for span in spans if span.lane == "communication")
    handles += [Patch(**_collective(kind), label=kind) for kind in kinds]
    if "backward" in phases:
        handles.append(Line2D([], [], **_BACKWARD_ENDS, label="backward ends"))
    return handles


def _collective(kind: str) -> dict[str, Any]:
    return {"facecolor": _COLORS.get(kind, _OTHER_COLLECTIVE), "edgecolor": _INK, "linewidth": 0.3}


def _lanes(simulation: Simulation) -> tuple[list[Span], list[Span]]:
    compute = [span for span in simulation.spans if span.lane == "compute"]
    return compute, [span for span in simulation.spans if span.lane == "communication"]


def _check_takes_time(simulation: Simulation) -> None:
    if not simulation.step_s > 0:
        raise ValueError(f"step_s (={simulation.step_s}) must be over 0: the program holds nothing that takes time")


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
