"""Timelines of a step as its profiler saw it: strategies beside each other on one axis of time."""

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
# Phases that compute come first; what is none of them communicates.
PHASES = ("forward", "loss", "backward", "optimizer", "compute")


def trace_figures(rows: Sequence[Row]) -> list[Figure]:
    """Draws the traces of some rows, all of a framework as long as their longest.

    Args:
        rows: Those with a ``trace``, a list of ``{lane, name, phase, start_ms, end_ms}``, are drawn.
    """
    traces = [(row, events) for row in rows if is_sound(row) and (events := events_of(row))]
    figures = []
    for row, events in traces:
        alike = [
            event for other, some in traces if text(other, "framework") == text(row, "framework") for event in some
        ]
        axis = linear([event.end_ms for event in alike])
        phases = [*PHASES, *sorted({event.phase for event in alike} - set(PHASES))]
        styles = {
            phase: index
            for index, phase in enumerate(phase for phase in phases if any(e.phase == phase for e in alike))
        }
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
    """Reads the events of a row's trace; what is none is left out."""
    trace = row.get("trace")
    events = []
    for one in trace if isinstance(trace, list) else []:
        start, end = (number(one, "start_ms"), number(one, "end_ms")) if isinstance(one, dict) else (None, None)
        if start is not None and end is not None and end >= start:
            events.append(Event(text(one, "lane"), text(one, "name"), text(one, "phase") or "other", start, end))
    return events


def _hidden(row: Row) -> str:
    # As the row has it: what is drawn closes the gaps between operations, and would hide more.
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
        Column("lane", lambda row: text(row, "lane")),
        Column("phase", lambda row: text(row, "phase")),
        numeric("events", "events", form=lambda value: f"{value:,}"),
        numeric("busy", "busy_ms", unit="ms"),
        numeric("first start", "start_ms", unit="ms"),
        numeric("last end", "end_ms", unit="ms"),
    )
    return Table(f"What ran in the traced step of {title}", columns, rows)
