"""Collectives by size: what a call takes, and the bandwidth that it reaches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..report.axis import Axis, logarithmic
from ..report.figure import NUM_STYLES, Figure
from ..report.lines import Curve, Point, draw_curves
from ..report.section import Section
from ..report.sentences import extremes, left_out, time_of, timed
from ..report.source import collectives_beside
from ..report.steps import group, ranks
from ..report.table import CHECK, Column, Table, field, numeric
from ..report.values import Row, buffer_bytes, by, is_sound, number, percent, short, size, span, spread, text


def _interval(row: Row, low: str, high: str) -> tuple[float, float | None] | None:
    """An interval of a fit; an upper end of None, as the row has it, is no bound."""
    ends = number(row, low), number(row, high)
    is_unbounded = high in row and row[high] is None
    return None if ends[0] is None or (ends[1] is None and not is_unbounded) else (ends[0], ends[1])


def _ends(interval: tuple[float, float | None]) -> str:
    low, high = interval
    return f"at least {short(low)}" if high is None else span((low, high))


def _size(row: Row) -> float:
    return buffer_bytes(row) or 0.0


_MICROSECONDS = "\N{GREEK SMALL LETTER MU}s"
_SIZES = [4.0**power for power in range(21)]
_COLUMNS = (
    Column("collective", lambda row: collective(row) or text(row, "part")),
    field("framework"),
    field("backend"),
    Column("ranks", ranks),
    Column("size", buffer_bytes, form=size),
    numeric("call", "median_ms", unit="ms"),
    Column("p10\N{EN DASH}p90", spread, "ms", span),
    numeric("algbw", "algbw_gb_per_s", unit="GB/s"),
    numeric("busbw", "busbw_gb_per_s", unit="GB/s"),
    field("kernel"),
    CHECK,
)
_FIT_COLUMNS = (
    *_COLUMNS[:4],
    numeric("latency", "alpha_us", unit=_MICROSECONDS),
    Column("95 % interval", partial(_interval, low="alpha_low_us", high="alpha_high_us"), _MICROSECONDS, _ends),
    numeric("rate", "gb_per_s", unit="GB/s"),
    Column("95 % interval", partial(_interval, low="gb_per_s_low", high="gb_per_s_high"), "GB/s", _ends),
    numeric("a rank sends", "bus_gb_per_s", unit="GB/s"),
    numeric("worst error", "worst_error", unit="of a call", form=percent),
    CHECK,
)


def collective(row: Row) -> str:
    """A row's collective, as HLO spells it."""
    return text(row, "collective").replace("_", "-")


def is_fit(row: Row) -> bool:
    """Whether a row is a fit over sizes."""
    return "alpha_us" in row


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    calls = [row for row in rows if not is_fit(row)]
    fits = [row for row in rows if is_fit(row)]
    placed = [row for row in calls if is_sound(row) and number(row, "median_ms") and _size(row)]
    styles = {each: style for style, each in enumerate(by(placed, group))}
    figures = [figure for name, some in by(placed, collective).items() for figure in _figures(name, some, styles)]
    tables = [Table("Calls by collective and size", _COLUMNS, calls)]
    if fits:
        note = (
            "of a call: time = latency + bytes of the buffer / rate; rate: the algbw of a large buffer; a rank sends:"
            " its busbw, the rate times the collective's bus factor, with the rate's interval times the same"
        )
        tables.append(Table("What the sizes of one collective have in common", _FIT_COLUMNS, fits, note))
    return Section(
        "Collectives by size", [*_sentences(calls), left_out(rows)], [*figures, *tables], collectives_beside(rows)
    )


def _figures(name: str, rows: Sequence[Row], styles: dict[str, int]) -> list[Figure]:
    x_axis = logarithmic(map(_size, rows), size, _SIZES)
    times = [value for row in rows for value in (row["median_ms"], *(spread(row) or ()))]
    figures = [_figure(f"{name}: time of a call", rows, styles, x_axis, logarithmic(times), "median_ms", "ms")]
    reached = [value for row in rows if (value := number(row, "busbw_gb_per_s"))]
    if reached:
        title = f"{name}: bus bandwidth"
        figures.append(_figure(title, rows, styles, x_axis, logarithmic(reached), "busbw_gb_per_s", "GB/s"))
    return figures


def _figure(
    title: str, rows: Sequence[Row], styles: dict[str, int], x_axis: Axis, y_axis: Axis, key: str, unit: str
) -> Figure:
    curves, said = [], []
    for name, some in by(rows, group).items():
        points = [
            Point(_size(row), value, spread(row) if key == "median_ms" else None)
            for row in some
            if (value := number(row, key))
        ]
        if points:
            # Of more curves than there are styles, the others are dashed.
            curves.append(Curve(name, styles[name], points, is_dashed=styles[name] >= NUM_STYLES))
            first, last = curves[-1].ends
            said.append(f"{name}: {short(first.y)} {unit} at {size(first.x)}, {short(last.y)} at {size(last.x)}.")
    drawing = draw_curves(curves, x_axis, y_axis, "size of the buffer", unit)
    return Figure(title, f"Both axes logarithmic. {' '.join(said)}", drawing, tuple(curve.key for curve in curves))


def _sentences(rows: Sequence[Row]) -> list[str]:
    """Says of each framework's most ranks what the smallest and the largest call take, and who is faster in the end."""
    shown = by(timed(rows), collective)
    name = "all-reduce" if "all-reduce" in shown else next(iter(shown), "")
    most: dict[str, list[Row]] = {}
    for some in by(shown.get(name, []), lambda row: text(row, "framework") + text(row, "backend")).values():
        ranks_ = max(number(row, "num_ranks") or 0 for row in some)
        most |= by([row for row in some if (number(row, "num_ranks") or 0) == ranks_], group)
    said = []
    for each, some in most.items():
        ordered = sorted((row for row in some if _size(row)), key=_size)
        if len(ordered) > 1:
            reached = number(ordered[-1], "busbw_gb_per_s")
            said.append(
                f"{each}: the {name} of {size(_size(ordered[0]))} takes {time_of(ordered[0])}, that of"
                f" {size(_size(ordered[-1]))} {time_of(ordered[-1])}"
                + (f", a bus bandwidth of {short(reached)} GB/s." if reached else ".")
            )
    sizes = [{_size(row) for row in some if _size(row)} for some in most.values()]
    shared = set.intersection(*sizes) if len(sizes) > 1 else set()
    if shared:
        at_end = [row for some in most.values() for row in some if _size(row) == max(shared)]
        said.append(f"At {size(max(shared))} {extremes(at_end, group, name)}")
    return said
