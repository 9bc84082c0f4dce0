"""The picture of traces: a rank's step under each strategy, what computes above what communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .overlap import COMMUNICATION, COMPUTE

_COLORS = {
    "forward": "#4c78a8", "loss": "#72b7b2", "backward": "#e07b39", "optimizer": "#54a24b", "compute": "#4c78a8",
    "gradient sync": "#7b8288", "metrics": "#b0b7bf",
}  # fmt: skip


def draw_traces(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws a panel for each trace; those of a framework have one scale.

    Args:
        rows: With ``trace``.
        path: Of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, panels = pyplot.subplots(
        len(rows), 1, figsize=(11, 1.35 * len(rows) + 0.7), squeeze=False, layout="constrained"
    )
    phases = [phase for phase in _COLORS if any(one["phase"] == phase for row in rows for one in row["trace"])]
    for axes, row in zip(panels[:, 0], rows, strict=True):
        for place, lane in enumerate((COMPUTE, COMMUNICATION)):
            for one in row["trace"]:
                if one["lane"] == lane:
                    width = one["end_ms"] - one["start_ms"]
                    axes.barh(
                        place, width, left=one["start_ms"], color=_COLORS.get(one["phase"], "#b0b7bf"), height=0.8
                    )
        longest = max(other["traced_ms"] for other in rows if other["framework"] == row["framework"])
        share = row["overlap_share"]
        overlap = "no communication" if share is None else f"{share:.0%} of communication overlaps computation"
        axes.set_title(f"{row['framework']}, {row['strategy']}, {row['backend']}: {overlap}", loc="left", fontsize=10)
        axes.set_xlim(0, longest)
        axes.set_yticks([0, 1], [COMPUTE, COMMUNICATION])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("ms from the start of the step, rank 0")
    legend = [Patch(color=_COLORS[phase], label=phase) for phase in phases]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(phases), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
