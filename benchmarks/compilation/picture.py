"""The compile benchmark's picture: seconds of each part over the number of devices and of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STYLES = {
    "trace": ("#4c78a8", "traced for the plan"),
    "export": ("#72b7b2", "traced and exported"),
    "compile": ("#e07b39", "compiled"),
    "read": ("#54a24b", "read"),
    "simulate": ("#b279a2", "simulated"),
}


def draw_curves(curves: Mapping[str, Sequence[Any]], exponents: Mapping[str, Any], path: Path, model: str) -> None:
    """Draws both curves, in CPU seconds.

    Args:
        curves: Points of ``"devices"`` and ``"parameters"``.
        exponents: Of the latter, by part.
        path: Of the PNG.
        model: Name of the model of the first.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5.8), layout="constrained")
    for axes, points, unit in ((left, curves["devices"], "H100s"), (right, curves["parameters"], "parameter tensors")):
        for part, (color, label) in _STYLES.items():
            timed = [point for point in points if point.has(part)]
            sizes = [point.size for point in timed]
            rounds = [point.rounds(part, clock="cpu_s") for point in timed]
            medians = [point.median_s(part, clock="cpu_s") for point in timed]
            spread = [
                [median - min(times) for median, times in zip(medians, rounds, strict=True)],
                [max(times) - median for median, times in zip(medians, rounds, strict=True)],
            ]
            if axes is right:
                label += f", power {exponents[part].fitted:.2f}, {exponents[part].last:.2f} at the end"  # noqa: PLW2901
            axes.errorbar(sizes, medians, yerr=spread, color=color, marker="o", markersize=4, capsize=3, label=label)
        axes.set_xscale("log", base=2 if axes is left else 10)
        axes.set_xticks([point.size for point in points], [f"{point.size:,}" for point in points])
        axes.minorticks_off()
        axes.set_xlabel(unit)
        axes.set_ylabel("CPU seconds, median (whiskers: all rounds)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e7ea", linewidth=0.6)
    left.set_ylim(0)
    right.set_yscale("log")
    sizes = [point.size for point in curves["parameters"] if point.has("compile")]
    largest = next(point for point in curves["parameters"] if point.size == sizes[-1])
    per_parameter_s = largest.median_s("compile", clock="cpu_s") / largest.size
    right.plot(sizes, [size * per_parameter_s for size in sizes], color="#888888", linestyle=":", label="linear")
    left.set_title(f"{model}, by the number of devices", loc="left", fontsize=11)
    right.set_title("small parameters, by their number", loc="left", fontsize=11)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.14))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
