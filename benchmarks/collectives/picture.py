"""The pictures of the collectives: time and bandwidth by size, and one backend's bandwidth over another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .cases import NAMES
from .ratio import PAIRS, Ratio, ratios, source_points, source_ratios
from .sizes import in_words
from .table import timed_rows

Row = Mapping[str, Any]

COLORS = {
    "XLA in-process": "#4c78a8",
    "XLA over Gloo": "#54a24b",
    "Gloo": "#e07b39",
    "XLA over NCCL": "#b279a2",
    "NCCL": "#d62728",
}
_PAIR_COLORS = dict(zip(PAIRS, ("#b279a2", "#54a24b", "#4c78a8", "#d62728"), strict=True))
_GREY, _SOURCE = "#e5e7ea", "#555555"


def draw(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draws a picture for each collective, and one of ratios.

    Args:
        rows: Of this benchmark.
        folder: Where to.

    Returns:
        Names of the files: none if nothing was measured.
    """
    timed = [row for row in timed_rows(rows) if "median_ms" in row]
    drawn = []
    for name in NAMES:
        if of_name := [row for row in timed if row["collective"] == name]:
            drawn.append(f"{name}.png")
            _draw_collective(of_name, name, folder / drawn[-1])
    if "all_reduce.png" in drawn:
        drawn.append("ratios.png")
        _draw_ratios(timed, folder / drawn[-1])
    return drawn


def _draw_collective(rows: Sequence[Row], name: str, path: Path) -> None:
    ranks = sorted({row["num_ranks"] for row in rows})
    figure, panels = _panels(2, len(ranks), figsize=(max(7.0, 1.0 + 4.2 * len(ranks)), 7.6), sharex=True, sharey="row")
    for column, num_ranks in enumerate(ranks):
        top, bottom = panels[:, column]
        here = [row for row in rows if row["num_ranks"] == num_ranks]
        sizes = {row["asked_bytes"] for row in rows}
        for backend, color in COLORS.items():
            of_backend = [row for row in here if row["backend"] == backend]
            _draw_backend(top, bottom, of_backend, backend, color)
            if name == "all_reduce" and (backend == "Gloo" or of_backend):
                sizes |= _draw_source(top, bottom, backend, num_ranks)
        top.set_title(f"{name}, {num_ranks} ranks", loc="left", fontsize=11)
        bottom.set_xlabel("full buffer")
        bottom.set_xscale("log", base=2)
        ticks = _apart(sorted(sizes))
        bottom.set_xticks(ticks, [in_words(size) for size in ticks], fontsize=8)
        for axes in (top, bottom):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.xaxis.minorticks_off()
    panels[0, 0].set_ylabel("time of a call, ms")
    panels[1, 0].set_ylabel("bus bandwidth, GB/s")
    _save(figure, panels[0], path, "medians; whiskers: 10th and 90th percentile of rounds")


def _draw_backend(top: Any, bottom: Any, rows: Sequence[Row], backend: str, color: str) -> None:
    right = [row for row in rows if row["check"] == "ok"]
    if right:
        size, p10, median, p90, rate = _arrays(right, "size_bytes", "p10_ms", "median_ms", "p90_ms", "busbw_gb_per_s")
        style = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1.4, "capsize": 2, "elinewidth": 0.9}
        top.errorbar(size, median, yerr=_around(p10, median, p90), label=backend, **style)
        sent = rate * median  # a call's, so the fastest call has the highest rate
        bottom.errorbar(size, rate, yerr=_around(sent / p90, rate, sent / p10), **style)
    for row in rows:
        if row["check"] != "ok":
            label = f"{backend}: wrong result"
            top.plot(row["size_bytes"], row["median_ms"], "x", color="red", markersize=10, mew=2, label=label)


def _around(low: np.ndarray, value: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    return [np.maximum(end, 0) for end in (value - low, high - value)]  # rounding may make an end negative


def _arrays(rows: Sequence[Row], *keys: str) -> list[np.ndarray]:
    return [np.array([row[key] for row in rows]) for key in keys]


def _draw_source(top: Any, bottom: Any, backend: str, num_ranks: int) -> set[int]:
    """Draws the source's points, if it has any, and gives their sizes."""
    points = source_points(backend, num_ranks)
    if points:
        size, mean, deviation, rate = _arrays(points, "size_bytes", "mean_ms", "std_ms", "busbw_gb_per_s")
        style = {"color": _SOURCE, "linestyle": "none", "marker": "D" if backend == "Gloo" else "s", "mfc": "white"}
        label = f"{backend}, the source's machine (mean, standard deviation)"
        top.errorbar(size, mean, yerr=deviation, capsize=2, markersize=5, label=label, **style)
        bottom.plot(size, rate, markersize=5, **style)
    return {one["size_bytes"] for one in points}


def _apart(sizes: Sequence[int]) -> list[int]:
    """Those of ascending sizes whose labels do not touch: each 8 times the one before, or more."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= 8 * kept[-1]:
            kept.append(size)
    return kept


def _draw_ratios(rows: Sequence[Row], path: Path) -> None:
    ranks = sorted({row["num_ranks"] for row in rows})
    figure, panels = _panels(len(ranks), 1, figsize=(10, 1.4 + 2.8 * len(ranks)), sharey=True)
    for axes, num_ranks in zip(panels[:, 0], ranks, strict=True):
        groups = {
            f"{ours} / {theirs}": (ratios(rows, (ours, theirs), num_ranks), _PAIR_COLORS[ours, theirs], "")
            for ours, theirs in PAIRS
        }
        groups["NCCL / Gloo, the source's machine"] = (source_ratios(("NCCL", "Gloo"), num_ranks), "#cccccc", "//")
        _draw_bars(axes, {label: group for label, group in groups.items() if group[0]})
        axes.set_title(f"all_reduce, {num_ranks} ranks", loc="left", fontsize=11)
        axes.set_ylabel("bandwidth / bandwidth")
    _save(
        figure, panels[:, 0], path,
        "above 1 the first is faster; whiskers: 95 % interval, of the source's one standard deviation",
    )  # fmt: skip


def _panels(num_rows: int, num_columns: int, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(num_rows, num_columns, layout="constrained", squeeze=False, **options)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=_GREY, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def _save(figure: Any, panels: Any, path: Path, caption: str) -> None:
    from matplotlib import pyplot

    found = [axes.get_legend_handles_labels() for axes in panels]
    shown = {label: handle for handles, labels in found for handle, label in zip(handles, labels, strict=True)}
    ncols = max(1, int(figure.get_figwidth() // 3.4))
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=ncols, frameon=False, fontsize=9, title=caption,
        title_fontsize=9,
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_bars(axes: Any, groups: dict[str, tuple[list[Ratio], str, str]]) -> None:
    from matplotlib import ticker

    sizes = sorted({one.asked_bytes for of_pair, _, _ in groups.values() for one in of_pair})
    width = 0.8 / max(3, len(groups))
    for index, (label, (of_pair, color, hatch)) in enumerate(groups.items()):
        places = [sizes.index(one.asked_bytes) + (index - (len(groups) - 1) / 2) * width for one in of_pair]
        value, low, high = (np.array(ends) for ends in zip(*(one[1:] for one in of_pair), strict=True))
        style = {"color": color, "hatch": hatch, "capsize": 2, "error_kw": {"elinewidth": 0.9}, "label": label}
        axes.bar(places, value - 1, width, bottom=1, yerr=_around(low, value, high), **style)
    axes.axhline(1, color="#333333", linewidth=0.9)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.minorticks_off()
    axes.set_xticks(range(len(sizes)), [in_words(size) for size in sizes], fontsize=8)
