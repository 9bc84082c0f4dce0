"""The main job's picture: each strategy's step as the part that computes and the part that waits for communication."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .results import Row, cells

_COMPUTE = {"jaxddp": "#4c78a8", "torchref": "#e07b39"}
_EXPOSED = "#b0b7bf"


def draw_steps(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws a bar for each row.

    Args:
        rows: With ``exposed_ms``.
        path: Of the PNG.
        title: Above the bars.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(9, 0.55 * len(rows) + 1.9), layout="constrained")
    for index, row in enumerate(rows):
        exposed = max(row.exposed_ms or 0.0, 0.0)
        axes.barh(index, row.median_ms - exposed, color=_COMPUTE[row.framework], height=0.7)
        axes.barh(index, exposed, left=row.median_ms - exposed, color=_EXPOSED, height=0.7)
        spread = [[row.median_ms - row.p10_ms], [row.p90_ms - row.median_ms]]
        axes.errorbar(row.median_ms, index, xerr=spread, color="#333333", capsize=3, linewidth=1)
        note = f"{row.median_ms:.0f} ms, {row.exposed_ms or 0:+.0f} exposed"
        if row.check != "ok":
            note += f"   {row.check}"
        axes.annotate(note, (max(row.p90_ms, row.median_ms), index), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [f"{row.framework}  {cells(row)[1]}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, max(row.p90_ms for row in rows) * 1.35)
    axes.set_xlabel("one training step, median (whiskers: 10th and 90th percentile), ms")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    legend = [Patch(color=color, label=f"{name}: step without communication") for name, color in _COMPUTE.items()]
    legend.append(Patch(color=_EXPOSED, label="exposed communication"))
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
