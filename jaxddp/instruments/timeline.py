"""Simulated steps as a picture: for each a lane for compute, coloured by phase, and one for communication.

A gap in compute is a wait for communication. All steps share one time axis.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..communication.buckets import describe_collectives
from ..scopes import METRICS_SCOPE
from .simulate import Simulation, Span

# Okabe and Ito's colour-blind safe palette, in the order of the legend.
_COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#009e73",
    "all-reduce": "#e69f00",
    "reduce-scatter": "#f0e442",
    "all-gather": "#cc79a7",
}
_OTHER = "#999999"
_WAIT: dict[str, Any] = {"facecolor": "#fbdcc8", "edgecolor": "#d55e00", "hatch": "//////", "linewidth": 0}
_LANES = {"compute": 1, "communication": 2}


def draw(simulations: Mapping[str, Simulation], path: str | Path, *, title: str = "") -> None:
    """Draws steps below each other on one time axis, labelled by their keys, into a file such as a PNG or an SVG."""
    if not (longest_ms := max((one.step_s for one in simulations.values()), default=0.0) * 1e3):
        raise ValueError(f"simulations (of {', '.join(simulations) or 'nothing'}) must hold something that takes time")

    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "hatch.linewidth": 0.8, "font.size": 9}):
        figure = Figure(figsize=(10, 0.8 + 1.1 * len(simulations)), layout="constrained")
        rows = figure.subplots(len(simulations), sharex=True, squeeze=False)[:, 0]
        for axes, (label, simulation) in zip(rows, simulations.items(), strict=True):
            _draw_row(axes, label, simulation, digits=max(0, 2 - math.floor(math.log10(longest_ms))))
        rows[-1].set(xlim=(0, longest_ms), xlabel="time in the step (ms)")
        handles = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in rows)
        found = {label: handle for of_row in handles for handle, label in of_row}
        legend = sorted(found, key=[*_COLORS, *found].index)
        figure.legend([found[label] for label in legend], legend, loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle(title, parse_math=False, fontsize=9, wrap=True)
        figure.savefig(path, dpi=200)


def _draw_row(axes: Any, label: str, simulation: Simulation, digits: int) -> None:
    """One strategy: compute and waits above, collectives below, its times in the title."""
    compute, communication = (_merged([span for span in simulation.spans if span.lane == lane]) for lane in _LANES)
    for kind, pieces in compute.items():
        # snap=False: short pieces would be rounded to one pixel or to none.
        axes.broken_barh(pieces, (1.1, 0.9), facecolor=_COLORS.get(kind, _OTHER), label=kind, snap=False)
    busy = sorted(piece for pieces in compute.values() for piece in pieces)
    ends = [0.0, *(start + duration for start, duration in busy)]
    starts = [*(start for start, _ in busy), simulation.step_s * 1e3]
    waits = [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]
    axes.broken_barh(waits, (1.1, 0.9), **_WAIT, label="waiting (exposed)", snap=False)
    for kind, pieces in communication.items():
        color = _COLORS.get(kind, _OTHER)
        axes.broken_barh(pieces, (0, 0.9), facecolor=color, edgecolor="black", linewidth=0.3, label=kind)
    if "backward" in compute:
        axes.axvline(sum(compute["backward"][-1]), color="black", linestyle="--", linewidth=1, label="backward ends")
    sent = [(span.kind, span.num_bytes) for span in simulation.spans
            if span.lane == "communication" and METRICS_SCOPE not in span.op_name]  # fmt: skip
    said = f"{label}: {describe_collectives(sent)}" if sent else label
    axes.set_title(said, loc="left", parse_math=False, fontsize=9)
    step_ms, exposed_ms = simulation.step_s * 1e3, simulation.exposed_s * 1e3
    axes.set_title(f"{step_ms:,.{digits}f} ms, exposed {exposed_ms:,.{digits}f} ms", loc="right", fontsize=9)
    axes.set_yticks([1.55, 0.45], _LANES)
    axes.spines[["top", "right"]].set_visible(False)


def _merged(spans: list[Span]) -> dict[str, list[tuple[float, float]]]:
    """Start and duration in ms by kind; compute without a gap is one piece, each collective its own."""
    merged: dict[str, list[tuple[float, float]]] = defaultdict(list)
    last = ""
    for span in spans:
        start, end = span.start_s * 1e3, span.end_s * 1e3
        if span.lane == "compute" and span.kind == last and sum(merged[last][-1]) >= start * (1 - 1e-12):
            start = merged[last].pop()[0]
        merged[span.kind].append((start, end - start))
        last = span.kind
    return merged
