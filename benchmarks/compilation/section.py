"""Compile time by number of devices and of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

from ..gates.section import gate_sentences, gate_table, is_gate
from ..harness.tables import CHECK, Column, Table, field, numeric
from ..harness.values import Row, by, is_bad, is_sound, number, short, span, text
from ..report.axis import linear, logarithmic
from ..report.figure import Figure
from ..report.lines import Curve, Point, curve_figure, values_of
from ..report.section import Section
from ..report.sentences import left_out

PARTS = ("trace", "plan", "export", "start", "compile", "read", "simulate")
TRACE_AND_COMPILE = ("trace", "plan", "export", "compile")
_DRAWN = ("trace", "export", "compile", "read", "simulate")
WALL, CPU = 0, 1
# Columns by heading: parts and clock.
_TIMED: dict[str, tuple[tuple[str, ...], int]] = {part: ((part,), WALL) for part in PARTS}
_TIMED |= {"trace and compile": (TRACE_AND_COMPILE, WALL), "CPU": (TRACE_AND_COMPILE, CPU)}


def seconds(row: Row, parts: Sequence[str], clock: int) -> list[float]:
    """Wall-clock or CPU seconds of some parts together, by round; empty if a part is missing."""
    timed = row["seconds"] if isinstance(row.get("seconds"), dict) else {}
    lists = [timed[part] if isinstance(timed.get(part), list | tuple) else [] for part in parts]
    found = [
        [number({"s": one[clock]}, "s") for one in rounds if isinstance(one, list | tuple) and len(one) == 2]
        for rounds in lists
    ]
    rounds = [sum(each) for each in zip(*found, strict=False) if None not in each]
    return rounds if all(found) else []


def middle(row: Row, parts: Sequence[str], clock: int) -> float | None:
    """The median of ``seconds``."""
    found = seconds(row, parts, clock)
    return median(found) if found else None


def least_most(row: Row, parts: Sequence[str], clock: int) -> tuple[float, float] | None:
    """The extremes of ``seconds``; None for fewer than two rounds."""
    found = seconds(row, parts, clock)
    return (min(found), max(found)) if len(found) > 1 else None


_CURVE = Column("curve", lambda row: text(row, "curve") or text(row, "part"))
_COLUMNS = (
    _CURVE,
    numeric("size", "size", form=lambda value: f"{value:,.0f}"),
    *(Column(name, partial(middle, parts=parts, clock=clock), "s") for name, (parts, clock) in _TIMED.items()),
    numeric("collectives", "planned", form=lambda value: f"{value:,.0f}"),
    CHECK,
)
_SPREADS = (
    _CURVE,
    numeric("size", "size", form=lambda value: f"{value:,.0f}"),
    Column("rounds", lambda row: max(len(seconds(row, (part,), WALL)) for part in PARTS), form=str),
    *(
        Column(name, partial(least_most, parts=parts, clock=clock), "s", span)
        for name, (parts, clock) in _TIMED.items()
    ),
)
_EXPONENTS = (
    field("part"),
    numeric("power, fitted", "fitted", form=lambda value: f"{value:.2f}"),
    numeric("power, at the end", "last", form=lambda value: f"{value:.2f}"),
    CHECK,
)


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    gates = [row for row in rows if is_gate(row)]
    exponents = [row for row in rows if number(row, "fitted") is not None]
    reading = [row for row in rows if number(row, "read_s") is not None]
    points = [row for row in rows if row not in gates and row not in exponents and row not in reading]
    repeated = [row for row in points if any(least_most(row, (part,), WALL) for part in PARTS)]
    parts = [
        *(_figure(curve, some) for curve, some in by(points, lambda row: text(row, "curve")).items()),
        Table("Seconds by the clock, medians over rounds", _COLUMNS, points),
        Table("The same, the least and the most of the rounds", _SPREADS, repeated),
        gate_table(gates),
        Table("How CPU time grows with the number of parameters", _EXPONENTS, exponents),
    ]
    sentences = [*_sentences(points, exponents), *map(_reading, reading), *gate_sentences(gates), left_out(points)]
    return Section("Compilation", sentences, parts, notes=list(_notes(points)))


def _notes(points: Sequence[Row]) -> Iterator[str]:
    yield "CPU: CPU time of trace, plan, export and compile, of all processes; the other columns are wall-clock time"
    for curve, row in {text(row, "curve"): row for row in points if isinstance(row.get("load"), list)}.items():
        before, after = row["load"]
        yield f"1-minute load on {row['cores']} cores: {before:.1f} before {curve} were timed, {after:.1f} after"


def _figure(curve: str, rows: Sequence[Row]) -> Figure | None:
    sized = [row for row in rows if is_sound(row) and number(row, "size")]
    curves = []
    for style, part in enumerate(_DRAWN):
        timed = [(row["size"], seconds(row, (part,), CPU)) for row in sized]
        points = [
            Point(size, median(some), (min(some), max(some))) for size, some in timed if some and median(some) > 0
        ]
        if points:
            curves.append(Curve(part, style, points))
    if not curves:
        return None
    sizes = sorted({row["size"] for row in sized})
    x_axis = logarithmic(sizes, lambda value: f"{value:,.0f}", sizes)
    values = values_of(curves)
    y_axis = logarithmic(values) if curve == "parameters" else linear(values)
    means = {"devices": "devices", "parameters": "parameter tensors"}.get(curve, "size")
    said = [f"{one.name}: {short(one.ends[1].y)} s at {one.ends[1].x:,.0f} {means}." for one in curves]
    title, y_means = f"CPU seconds by number of {means}", "CPU seconds; whiskers: all rounds"
    return curve_figure(title, " ".join(said), curves, x_axis, y_axis, means, y_means)


def _sentences(points: Sequence[Row], exponents: Sequence[Row]) -> list[str]:
    said = []
    for curve, some in by([row for row in points if is_sound(row)], lambda row: text(row, "curve")).items():
        timed = sorted(
            (row["size"], value) for row in some if number(row, "size") and (value := middle(row, ("compile",), WALL))
        )
        if len(timed) > 1:
            (few, first), (many, last) = timed[0], timed[-1]
            said.append(
                f"Compiling for {few:,} {curve} takes {short(first)} s, and for {many:,} it takes {short(last)} s,"
                f" {last / first:.2f} times as long."
            )
    for row in exponents:
        if text(row, "part") == "trace and compile":
            said.append(
                f"Tracing and compiling grow with the number of parameters as its power {row['fitted']:.2f},"
                f" {short(number(row, 'last') or 0)} at the end."
            )
    return said


def _reading(row: Row) -> str:
    limit = f"{number(row, 'limit_s') or 0:g} s{' MISSED' if is_bad(row) else ''}"
    return f"Reading and simulating a step takes {short(row['read_s'])} s at most, limit {limit}."
