"""Timelines of a step from the frameworks' profilers, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence

from ..harness.intervals import Event
from ..harness.tables import CHECK, Column, Table, field, numeric
from ..harness.values import Row, by, is_sound, number, percent, text
from ..report.axis import linear
from ..report.figure import Figure, Key
from ..report.lanes import busy_ms, draw_lanes
from ..report.steps import name

TRACE_COLUMNS = (
    Column("strategy", name),
    field("framework"),
    numeric("traced step", "traced_ms", unit="ms"),
    numeric("computes", "compute_ms", unit="ms"),
    numeric("communicates", "communication_ms", unit="ms"),
    numeric("overlap", "overlap_share", form=percent),
    CHECK,
)
# Compute phases; other phases communicate.
PHASES = ("forward", "loss", "backward", "optimizer", "compute")


def trace_figures(rows: Sequence[Row]) -> list[Figure]:
    """Draws rows with a ``trace``, a list of ``{lane, name, phase, start_ms, end_ms}``, on one axis per framework."""
    traces = [(row, events) for row in rows if is_sound(row) and (events := events_of(row))]
    figures = []
    for row, events in traces:
        framework = text(row, "framework")
        alike = [event for other, some in traces if text(other, "framework") == framework for event in some]
        axis = linear([event.end_ms for event in alike])
        seen = {event.phase for event in alike}
        phases = [*(phase for phase in PHASES if phase in seen), *sorted(seen - set(PHASES))]
        styles = {phase: style for style, phase in enumerate(phases)}
        lanes = list(by(events, lambda event: event.lane))
        title = " ".join(filter(None, [text(row, "framework"), name(row)]))
        figures.append(
            Figure(
                f"Timeline of a step: {title}",
                f"{_hidden(row)} Lanes: {', '.join(lanes)}.",
                draw_lanes(events, lanes, styles, axis),
                tuple(Key(phase, style) for phase, style in styles.items()),
                _table(title, events),
            )
        )
    return figures


def trace_sentences(rows: Sequence[Row]) -> list[str]:
    """A sentence for each trace: how much of its communication overlapped computation."""
    return [_hidden(row) for row in rows if is_sound(row) and events_of(row)]


def events_of(row: Row) -> list[Event]:
    """Reads the events of a row's trace; invalid ones are left out."""
    trace = row.get("trace")
    events = []
    for one in trace if isinstance(trace, list) else []:
        start, end = (number(one, "start_ms"), number(one, "end_ms")) if isinstance(one, dict) else (None, None)
        if start is not None and end is not None and end >= start:
            events.append(Event(text(one, "lane"), text(one, "name"), text(one, "phase") or "other", start, end))
    return events


def _hidden(row: Row) -> str:
    # From the row: the drawn events close gaps between operations, so they would overlap more.
    share, communication_ms = number(row, "overlap_share"), number(row, "communication_ms")
    title = " ".join(filter(None, [text(row, "framework"), name(row)]))
    if share is None or communication_ms is None:
        return f"{title}: the trace shows no communication."
    return (
        f"{title}: of {communication_ms:.3g} ms of communication in the traced step,"
        f" {percent(share)} ran while something was computed."
    )


def _table(title: str, events: Sequence[Event]) -> Table:
    rows = [
        {"lane": lane, "phase": phase, "events": len(some), "busy_ms": busy_ms(some),
         "start_ms": min(event.start_ms for event in some), "end_ms": max(event.end_ms for event in some)}
        for (lane, phase), some in by(events, lambda event: (event.lane, event.phase)).items()
    ]  # fmt: skip
    columns = (
        field("lane"),
        field("phase"),
        numeric("events", "events", form=lambda value: f"{value:,}"),
        numeric("busy", "busy_ms", unit="ms"),
        numeric("first start", "start_ms", unit="ms"),
        numeric("last end", "end_ms", unit="ms"),
    )
    return Table(f"What ran in the traced step of {title}", columns, rows)
