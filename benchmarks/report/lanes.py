"""Timelines: operations in lanes below each other."""

from __future__ import annotations

from collections.abc import Sequence

from ..harness.intervals import Event, merge
from ..harness.values import cut, short
from .axis import Axis
from .figure import TICK_ROOM, Drawing, along, area, axis_along, words
from .markup import Markup, join, tag

_LANE, _LABEL, _BLOCK = 44, 14, 20  # pixels
_FINEST = 1 / 1500  # share of the axis; events closer together are one block


def draw_lanes(events: Sequence[Event], lanes: Sequence[str], styles: dict[str, int], axis: Axis) -> Drawing:
    """Draws a timeline; events of one lane and phase whose gap is too small to see are joined."""
    drawn: list[Markup] = []
    for index, lane in enumerate(lanes):
        y = index * _LANE
        drawn.append(words(cut(lane, 40), 0, y + _LABEL - 3, "label"))
        drawn += [_block(event, styles[event.phase], axis, y + _LABEL) for event in _merged(events, lane, axis)]
    bottom = len(lanes) * _LANE - 6
    return Drawing(join(axis_along(axis, 0, bottom, "ms"), *drawn), bottom + TICK_ROOM, is_wide=True)


def busy_ms(events: Sequence[Event]) -> float:
    """How long at least one event was running."""
    return sum(end - start for start, end in merge((event.start_ms, event.end_ms) for event in events))


def _merged(events: Sequence[Event], lane: str, axis: Axis) -> list[Event]:
    gap = (axis.high - axis.low) * _FINEST
    merged: list[Event] = []
    for event in sorted((event for event in events if event.lane == lane), key=lambda event: event.start_ms):
        last = merged[-1] if merged else None
        if last is not None and last.phase == event.phase and event.start_ms - last.end_ms < gap:
            name = last.name if last.name == event.name else ""
            merged[-1] = last._replace(end_ms=max(last.end_ms, event.end_ms), name=name)
        else:
            merged.append(event)
    return merged


def _block(event: Event, style: int, axis: Axis, y: float) -> Markup:
    start, end = axis.at(event.start_ms), axis.at(event.end_ms)
    name = f"{event.name or event.phase}: {short(event.start_ms)} to {short(event.end_ms)} ms"
    return tag(
        "rect", tag("title", cut(name)), x=along(start), y=y, width=along(max(end - start, _FINEST)), height=_BLOCK,
        class_=area(style),
    )  # fmt: skip
