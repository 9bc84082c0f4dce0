"""The picture of steps: each as the part that computes and the part that waits for communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..training.steps import label
from .tables import milliseconds

_COMPUTE = {"jaxddp": "#4c78a8", "torchref": "#e07b39"}
_EXPOSED = "#b0b7bf"


def draw_steps(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draws a bar for each row.

    Args:
        rows: Of training steps that were timed.
        path: Of the PNG.
        title: Above the bars.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(10, 0.5 * len(rows) + 1.9), layout="constrained")
    for index, row in enumerate(rows):
        color, median = _COMPUTE[row["framework"]], row["median_ms"]
        if row["exposed_ms"] is None:
            axes.barh(index, median, color=color, height=0.7, alpha=0.55, hatch="///", edgecolor="white")
            note = f"{milliseconds(median)} ms, not split"
        else:
            shown = min(max(row["exposed_ms"], 0.0), median)
            axes.barh(index, median - shown, color=color, height=0.7)
            axes.barh(index, shown, left=median - shown, color=_EXPOSED, height=0.7)
            note = f"{milliseconds(median)} ms, {milliseconds(row['exposed_ms'], sign='+')} exposed"
        spread = [[median - row["p10_ms"]], [row["p90_ms"] - median]]
        axes.errorbar(median, index, xerr=spread, color="#333333", capsize=3, linewidth=1)
        if row["check"] != "ok":
            note += f"   {row['check']}"
        axes.annotate(note, (max(row["p90_ms"], median), index), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [f"{row['framework']}  {label(row)}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, max(row["p90_ms"] for row in rows) * 1.35)
    axes.set_xlabel("one training step, median (whiskers: 10th and 90th percentile), ms")
    how = {row["framework"]: f"{row['framework']}: {row['num_ranks']} {row['kind']}, {row['backend']}" for row in rows}
    axes.set_title(f"{title}\n{'; '.join(how.values())}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    legend = [Patch(color=_COMPUTE[name], label=f"{name}: step without communication") for name in how]
    legend.append(Patch(color=_EXPOSED, label="exposed communication"))
    if any(row["exposed_ms"] is None for row in rows):
        legend.append(Patch(facecolor="#999999", alpha=0.55, hatch="///", edgecolor="white", label="step, not split"))
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
