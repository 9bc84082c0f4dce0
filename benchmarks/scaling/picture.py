"""The scaling benchmark's picture: efficiency over the number of ranks, strong and weak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..training.steps import label

_COLORS = {"jaxddp": "#4c78a8", "torchref": "#e07b39"}
_MARKERS = "osD^vP*X"


def draw_scaling(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws a panel for each mode.

    Args:
        rows: With ``efficiency``.
        path: Of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    modes = list(dict.fromkeys(row["mode"] for row in rows))
    labels = list(dict.fromkeys(row["strategy"] for row in rows))
    figure, panels = pyplot.subplots(1, len(modes), figsize=(6 * len(modes), 4.6), squeeze=False, sharey=True)
    for axes, mode in zip(panels[0], modes, strict=True):
        curves: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["mode"] == mode and not row["check"].startswith("WRONG"):
                of = f"{row['framework']}, {label(row)}, {row['model']}"
                how = f"simulated, {row['device']}" if row["how"] == "simulated" else f"measured, {row['backend']}"
                curves.setdefault(f"{of}, {how}", []).append(row)
        for name, points in curves.items():
            points.sort(key=lambda row: row["num_ranks"])
            shares = [row["efficiency"] for row in points]
            spread = [
                [max(0.0, row["efficiency"] - row.get("efficiency_low", row["efficiency"])) for row in points],
                [max(0.0, row.get("efficiency_high", row["efficiency"]) - row["efficiency"]) for row in points],
            ]
            first = points[0]
            axes.errorbar(
                [row["num_ranks"] for row in points], shares, yerr=spread, label=name, capsize=3,
                color=_COLORS[first["framework"]], linestyle=":" if first["how"] == "simulated" else "-",
                marker=_MARKERS[labels.index(first["strategy"]) % len(_MARKERS)], markersize=5,
            )  # fmt: skip
        counts = sorted({row["num_ranks"] for row in rows if row["mode"] == mode})
        axes.axhline(1, color="#b0b7bf", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
        axes.set_ylim(0)
        axes.set_xlabel("ranks")
        axes.set_title(f"{mode} scaling", loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    panels[0][0].set_ylabel("efficiency (whiskers: 95 % interval)")
    cores = next((row["cores"] for row in rows if "cores" in row), None)
    if cores and any(row["device"] == "cpu" and row["num_ranks"] > cores for row in rows):
        figure.text(0.01, 0.005, f"measured on {cores} cores: more ranks than that take turns", fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
