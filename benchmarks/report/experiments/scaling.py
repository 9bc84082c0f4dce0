"""Scaling: how much of the first ranks' speed each further one keeps, as measured and as simulated."""

from __future__ import annotations

from collections.abc import Sequence

from ..axis import linear, logarithmic
from ..figure import Figure
from ..lines import Curve, Point, draw_curves
from ..section import Section
from ..sentences import left_out
from ..steps import STEP_COLUMNS
from ..table import CHECK, Column, Table, numeric
from ..values import NONE, Row, by, counted, is_sound, number, percent, plain, text

_RANKS = [2.0**power for power in range(14)]
_COLUMNS = (
    Column("scaling", lambda row: text(row, "mode") or text(row, "part")),
    STEP_COLUMNS[0],
    *STEP_COLUMNS[1:4],
    Column("how", lambda row: how(row)),
    *STEP_COLUMNS[8:11],
    numeric("efficiency", "efficiency", form=percent),
    Column("95 % interval", lambda row: interval(row), form=lambda ends: NONE.join(map(percent, ends))),
    CHECK,
)


def how(row: Row) -> str:
    """Whether a row was measured or simulated."""
    return text(row, "how")


def interval(row: Row) -> tuple[float, float] | None:
    """The 95 % interval of a measured efficiency."""
    low, high = number(row, "efficiency_low"), number(row, "efficiency_high")
    return None if low is None or high is None else (low, high)


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    placed = [
        row for row in rows if is_sound(row) and number(row, "efficiency") is not None and number(row, "num_ranks")
    ]
    figures = [_figure(mode, some) for mode, some in by(placed, lambda row: text(row, "mode")).items()]
    table = Table("Efficiency by number of ranks", _COLUMNS, rows)
    return Section("Scaling", [*_sentences(placed), _crowded(placed), left_out(rows)], [*figures, table])


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
    y_axis = linear([1.0, *(end for row in rows for end in (row["efficiency"], *(interval(row) or ())))], percent)
    said = [f"{curve.name}: {percent(curve.ends[1].y)} at {plain(curve.ends[1].x)} ranks." for curve in curves]
    drawing = draw_curves(curves, x_axis, y_axis, "ranks", "efficiency")
    return Figure(f"Efficiency, {mode} scaling", " ".join(said), drawing, tuple(curve.key for curve in curves))


def _sentences(rows: Sequence[Row]) -> list[str]:
    said = []
    for mode, some in by(rows, lambda row: text(row, "mode")).items():
        for kind, alike in by(some, how).items():
            most = max(row["num_ranks"] for row in alike)
            at_end = sorted((row for row in alike if row["num_ranks"] == most), key=lambda row: row["efficiency"])
            if most > 1:
                words = ", ".join(f"{_of(row)} {percent(row['efficiency'])}" for row in reversed(at_end))
                said.append(f"{mode.capitalize()} scaling to {most} ranks{', ' if kind else ''}{kind}, keeps: {words}.")
    return said


def _crowded(rows: Sequence[Row]) -> str:
    """Says where ranks take turns on the cores of their machine, which no cluster's do."""
    cores = {cores for row in rows if text(row, "device") == "cpu" and (cores := number(row, "cores"))}
    crowded = [row for row in rows if how(row) == "measured" and cores and row["num_ranks"] > max(cores)]
    if not crowded:
        return ""
    fewest = min(row["num_ranks"] for row in crowded)
    return (
        f"From {fewest} ranks on they take turns on {counted(int(max(cores)), 'core')}: what is measured there says"
        " nothing of a cluster."
    )


def _of(row: Row) -> str:
    return " ".join(filter(None, [text(row, "framework"), STEP_COLUMNS[0].cell(row)]))
