"""A lab: the measured links, and the benchmarks that ran in it, each of which has a section of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ..harness.tables import CHECK, Column, Table, field, numeric
from ..harness.values import Row, ends, is_sound, number, short, span, spread, text
from ..report.section import Section
from ..report.sentences import left_out, time_of

_PERCENTILES = "p10\N{EN DASH}p90"
_carried = partial(ends, low="p10_mbit", high="p90_mbit")


def round_trip(row: Row) -> Row:
    """The time of a link's round trips; empty if it was not measured."""
    found = row.get("round_trip")
    return found if isinstance(found, Mapping) else {}


_LINK_COLUMNS = (
    field("link", "part"),
    numeric("asked for", "asked_mbit", unit="Mbit/s", form=lambda value: f"{value:g}"),
    numeric("carried", "rate_mbit", unit="Mbit/s"),
    Column(_PERCENTILES, _carried, "Mbit/s", span),
    numeric("round trip", "round_trip", "median_ms", unit="ms"),
    Column(_PERCENTILES, lambda row: spread(round_trip(row)), "ms", span),
    field("congestion control", "congestion_control"),
    CHECK,
)


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    links = [row for row in rows if "asked_mbit" in row]
    others = [row for row in rows if "asked_mbit" not in row]
    note = (
        "carried: TCP's payload from one host to another without other traffic, median over windows of 0.1 s or"
        " more; headers take 4 % of the link's rate"
    )
    measured = Table("Links as measured", _LINK_COLUMNS, links, note)
    ran = Table("What ran in the lab", (field("part"), CHECK), others)
    said = [_in_words(row) for row in links if is_sound(row)]
    return Section("The network", list(filter(None, [*said, left_out(rows)])), [measured, ran])


def _in_words(row: Row) -> str:
    rate, asked = number(row, "rate_mbit"), number(row, "asked_mbit")
    low_high, trip = _carried(row), round_trip(row)
    if rate is None or low_high is None or asked is None:
        return ""
    words = f"{text(row, 'part')}: TCP carries {short(rate)} Mbit/s ({_PERCENTILES} {span(low_high)}) of the {asked:g}"
    words += " Mbit/s asked for"
    return words + (f", and a round trip takes {time_of(trip)}." if number(trip, "median_ms") is not None else ".")
