"""Scaling efficiency, measured and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..harness.tables import CHECK, Column, Table, numeric
from ..harness.values import NONE, Row, by, counted, ends, is_sound, number, percent, plain, span, spread, text
from ..report.axis import linear, logarithmic
from ..report.figure import Figure
from ..report.lines import Curve, Point, curve_figure, values_of
from ..report.section import Section
from ..report.sentences import left_out
from ..report.steps import STEP_COLUMNS, without_comparison

_RANKS = [2.0**power for power in range(14)]
how = partial(text, key="how")  # measured or simulated
interval = partial(ends, low="efficiency_low", high="efficiency_high")  # the 95 % interval of a measured efficiency
_INTERVAL = Column("95 % interval", interval, form=lambda both: NONE.join(map(percent, both)))
_STEP = {column.name: replace(column, is_wide=False) for column in STEP_COLUMNS[:-4]}
_COLUMNS = (
    Column("scaling", lambda row: text(row, "mode") or text(row, "part")),
    _STEP["framework"],
    _STEP["strategy"],
    Column("how", how),
    _STEP["ranks"],
    numeric("batch", "global_batch", form=lambda value: f"{value:,.0f}"),
    _STEP["compiled"],
    _STEP["step"],
    Column("p10\N{EN DASH}p90", spread, "ms", span),
    numeric("efficiency", "efficiency", form=percent),
    _INTERVAL,
    Column("crowded", lambda row: on_cores(row)),
    CHECK,
)
_ORDER = {"strong": 0, "weak": 1}


def on_cores(row: Row) -> str:
    """The number of CPU ranks and of cores if the ranks outnumber them; otherwise empty."""
    num_ranks, cores = number(row, "num_ranks"), number(row, "cores")
    is_crowded = text(row, "device") == "cpu" and num_ranks and cores and num_ranks > cores
    return f"{num_ranks} on {cores} cores" if is_crowded else ""


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    placed = [
        row for row in rows if is_sound(row) and number(row, "efficiency") is not None and number(row, "num_ranks")
    ]
    figures = [_figure(mode, some) for mode, some in by(placed, lambda row: text(row, "mode")).items()]
    ordered = sorted(
        without_comparison(rows),
        key=lambda row: (_ORDER.get(text(row, "mode"), 2), how(row), text(row, "framework")),
    )
    table = Table("Efficiency by number of ranks", _COLUMNS, ordered, group=lambda row: text(row, "mode"))
    networks = list(dict.fromkeys(text(row, "network") for row in rows))
    note = (
        "efficiency: of the speed per rank that the fewest ranks have; numbers of ranks ran one after the other, each"
        " in processes of its own, so the interval is that of two medians"
    )
    sentences = [*_sentences(placed), _crowded(placed), left_out(rows)]
    return Section("Scaling", sentences, [*figures, table], notes=[note, *networks])


def _curve_name(row: Row) -> str:
    return ", ".join(filter(None, [text(row, "framework"), STEP_COLUMNS[0].cell(row), how(row)]))


def _figure(mode: str, rows: Sequence[Row]) -> Figure:
    styles = {
        key: style for style, key in enumerate(by(rows, lambda row: (text(row, "framework"), text(row, "strategy"))))
    }
    curves = [
        Curve(
            name,
            styles[text(some[0], "framework"), text(some[0], "strategy")],
            [Point(row["num_ranks"], row["efficiency"], interval(row)) for row in some],
            is_dashed=how(some[0]) == "simulated",
        )
        for name, some in by(rows, _curve_name).items()
    ]
    x_axis = logarithmic([row["num_ranks"] for row in rows], plain, _RANKS)
    y_axis = linear([1.0, *values_of(curves)], percent)
    last = [(curve.name, curve.ends[1]) for curve in curves]
    said = [f"{name}: {_with_interval(end.y, end.low_high)} at {plain(end.x)} ranks." for name, end in last]
    return curve_figure(f"Efficiency, {mode} scaling", " ".join(said), curves, x_axis, y_axis, "ranks", "efficiency")


def _sentences(rows: Sequence[Row]) -> list[str]:
    said = []
    for mode, some in by(rows, lambda row: text(row, "mode")).items():
        for kind, alike in by(some, how).items():
            # The efficiency of a curve's fewest ranks is 1 by definition.
            further = [row for curve in by(alike, _curve_name).values() for row in _beyond_fewest(curve)]
            most = max((row["num_ranks"] for row in further), default=0)
            at_end = sorted((row for row in further if row["num_ranks"] == most), key=lambda row: -row["efficiency"])
            if at_end:
                words = ", ".join(f"{_of(row)} {_kept(row)}" for row in at_end)
                said.append(f"{mode.capitalize()} scaling to {most} ranks{', ' if kind else ''}{kind}, keeps: {words}.")
    return said


def _beyond_fewest(rows: Sequence[Row]) -> list[Row]:
    fewest = min(row["num_ranks"] for row in rows)
    return [row for row in rows if row["num_ranks"] > fewest]


def _crowded(rows: Sequence[Row]) -> str:
    """A sentence on runs with more ranks than cores, whose ranks share cores, unlike a cluster's."""
    cores = {cores for row in rows if text(row, "device") == "cpu" and (cores := number(row, "cores"))}
    crowded = [row for row in rows if how(row) == "measured" and cores and row["num_ranks"] > max(cores)]
    if not crowded:
        return ""
    fewest = min(row["num_ranks"] for row in crowded)
    return (
        f"From {fewest} ranks on they take turns on {counted(int(max(cores)), 'core')}: what is measured there says"
        " nothing of a cluster."
    )


def _kept(row: Row) -> str:
    """A row's efficiency, with its interval; a simulated row has none."""
    has_no_spread = how(row) == "measured" and interval(row) is None
    return _with_interval(row["efficiency"], interval(row)) + (" (no spread is known)" if has_no_spread else "")


def _with_interval(efficiency: float, low_high: tuple[float, float] | None) -> str:
    return percent(efficiency) + (f" (95 % interval {_INTERVAL.form(low_high)})" if low_high else "")


def _of(row: Row) -> str:
    return " ".join(filter(None, [text(row, "framework"), STEP_COLUMNS[0].cell(row)]))
