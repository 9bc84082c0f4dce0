"""Simulated steps as a picture: for each a lane for compute, coloured by phase, and one for communication.

A gap in compute is a wait for communication. All steps share one time axis.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from .simulate import Simulation

# Okabe and Ito's colour-blind safe palette.
_COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#009e73",
    "all-reduce": "#e69f00",
    "reduce-scatter": "#f0e442",
    "all-gather": "#cc79a7",
}
_OTHER = "#999999"


def draw(simulations: Mapping[str, Simulation], path: str | Path, *, title: str = "") -> None:
    """Draws steps below each other on one time axis, labelled by their keys, into a file such as a PNG or an SVG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 1 + 1.1 * len(simulations)), layout="constrained")
    rows = figure.subplots(len(simulations), sharex=True, squeeze=False)[:, 0]
    for axes, (label, simulation) in zip(rows, simulations.items(), strict=True):
        pieces: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for span in simulation.spans:
            pieces[span.lane, span.kind].append((span.start_s * 1e3, (span.end_s - span.start_s) * 1e3))
        for (lane, kind), parts in pieces.items():
            # snap=False: short ones would be rounded to one pixel or to none.
            axes.broken_barh(parts, (1.1 * (lane == "compute"), 0.9), facecolor=_COLORS.get(kind, _OTHER), snap=False)
        axes.set_title(label, loc="left", parse_math=False)
        axes.set_title(f"{simulation.step_s * 1e3:.4g} ms, exposed {simulation.exposed_s * 1e3:.4g} ms", loc="right")
        axes.set_yticks([1.55, 0.45], ["compute", "communication"])
    rows[-1].set(xlim=(0, None), xlabel="time in the step (ms)")
    legend = [Patch(facecolor=color, label=kind) for kind, color in _COLORS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.suptitle(title, parse_math=False, wrap=True)
    figure.savefig(path, dpi=200)
