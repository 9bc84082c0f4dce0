"""Simulated steps as a picture on one time axis: a lane of compute, with gaps for waits, above one of communication."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .simulate import Simulation

# Okabe and Ito's colour-blind safe palette, in the order of the legend.
_COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#009e73",
    "all-reduce": "#e69f00",
    "reduce-scatter": "#f0e442",
    "all-gather": "#cc79a7",
}
_WAIT: dict[str, Any] = {"facecolor": "#fbdcc8", "edgecolor": "#d55e00", "hatch": "//////", "linewidth": 0}


def draw(simulations: Mapping[str, Simulation], path: str | Path, *, title: str = "") -> None:
    """Draws steps below each other on one time axis, labelled by their keys, into a file such as a PNG or an SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "hatch.linewidth": 0.8, "font.size": 9}):
        figure = Figure(figsize=(10, 0.8 + 1.1 * len(simulations)), layout="constrained")
        rows = figure.subplots(len(simulations), sharex=True, squeeze=False)[:, 0]
        for axes, (label, simulation) in zip(rows, simulations.items(), strict=True):
            _draw_row(axes, label, simulation)
        rows[-1].set(xlim=(0, max(one.step_s for one in simulations.values()) * 1e3), xlabel="time in the step (ms)")
        handles = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in rows)
        found = {label: handle for of_row in handles for handle, label in of_row}
        legend = sorted(found, key=[*_COLORS, *found].index)
        figure.legend([found[label] for label in legend], legend, loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle(title, parse_math=False, fontsize=9, wrap=True)
        figure.savefig(path, dpi=200)


def _draw_row(axes: Any, label: str, simulation: Simulation) -> None:
    """One strategy: compute over waits above, collectives below, its times in the title."""
    step_ms, exposed_ms = simulation.step_s * 1e3, simulation.exposed_s * 1e3
    if exposed_ms > 0:
        axes.broken_barh([(0, step_ms)], (1.1, 0.9), **_WAIT, label="waiting (exposed)", snap=False)
    pieces: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in simulation.spans:
        pieces[span.lane, span.kind].append((span.start_s * 1e3, (span.end_s - span.start_s) * 1e3))
    for (lane, kind), parts in pieces.items():
        color, is_compute = _COLORS.get(kind, "#999999"), lane == "compute"
        # Operations that touch have no seams; snap=False: short ones would be rounded to one pixel or to none.
        style = {"linewidth": 0, "antialiased": False, "snap": False} if is_compute else {"linewidth": 0.3}
        axes.broken_barh(parts, (1.1 * is_compute, 0.9), facecolor=color, edgecolor="black", label=kind, **style)
    if backward := pieces.get(("compute", "backward")):
        axes.axvline(sum(backward[-1]), color="black", linestyle="--", linewidth=1, label="backward ends")
    axes.set_title(label, loc="left", parse_math=False, fontsize=9)
    axes.set_title(f"{step_ms:.4g} ms, exposed {exposed_ms:.4g} ms", loc="right", fontsize=9)
    axes.set_yticks([1.55, 0.45], ["compute", "communication"])
    axes.spines[["top", "right"]].set_visible(False)
