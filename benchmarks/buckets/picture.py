"""The bucket benchmark's picture: steps by cap, as measured, predicted and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLORS = {"jaxddp": "#4c78a8", "torchref": "#e07b39"}
_COMPUTED = (("predicted_ms", "predicted by the pipeline", "--"), ("simulated_ms", "simulated as compiled", ":"))


def draw_buckets(rows: Sequence[Mapping[str, Any]], optima: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws a panel for each framework.

    Args:
        rows: Of caps that were timed.
        optima: The best of them.
        path: Of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    frameworks = list(dict.fromkeys(row["framework"] for row in rows))
    figure, panels = pyplot.subplots(1, len(frameworks), figsize=(6 * len(frameworks), 4.6), squeeze=False)
    for axes, framework in zip(panels[0], frameworks, strict=True):
        some = [row for row in rows if row["framework"] == framework]
        right = [row for row in some if not row["check"].startswith("WRONG")]
        caps = [row["bucket_mb"] for row in right]
        spread = [
            [row["median_ms"] - row["p10_ms"] for row in right],
            [row["p90_ms"] - row["median_ms"] for row in right],
        ]
        axes.errorbar(
            caps, [row["median_ms"] for row in right], yerr=spread, color=_COLORS[framework], marker="o", markersize=4,
            capsize=3, label="measured, median (whiskers: p10, p90)",
        )  # fmt: skip
        for key, words, style in _COMPUTED:
            if placed := [row for row in right if row.get(key) is not None]:
                axes.plot(
                    [row["bucket_mb"] for row in placed], [row[key] for row in placed], color="#333333",
                    linestyle=style, marker=".", label=words,
                )  # fmt: skip
        for row in [row for row in right if "step_alone_ms" in row][:1]:
            axes.axhline(row["step_alone_ms"], color="#b0b7bf", linewidth=1, label="without communication")
        for row in optima:
            if row["framework"] == framework:
                words = f"best predicted, {row['optimum_mb']:g} MiB ({row['regime']})"
                axes.axvline(row["optimum_mb"], color="#54a24b", linewidth=1, linestyle="-.", label=words)
        axes.set_xscale("log")
        axes.set_xticks(sorted(set(caps)), [f"{cap:g}" for cap in sorted(set(caps))])
        axes.minorticks_off()
        axes.set_ylim(0)
        axes.set_xlabel("cap of a bucket, MiB")
        axes.set_ylabel("one training step, ms")
        first = some[0]
        axes.set_title(
            f"{framework}, {first['model']}, {first['num_ranks']} {first['kind']}, {first['backend']}",
            loc="left", fontsize=11,
        )  # fmt: skip
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
