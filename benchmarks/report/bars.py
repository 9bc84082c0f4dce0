"""Horizontal bars with a name and a number above each: stacked segments, or an interval around a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..harness.values import by, cut
from .axis import Axis
from .figure import TICK_ROOM, Drawing, along, area, axis_along, line, words
from .markup import Markup, join, tag

_ROW, _NOTE_ROW, _HEADING, _BAR_TOP, _BAR = 38, 16, 26, 18, 12  # pixels
# Characters that fit on a line of a narrow page, and on a line that label and note share.
_LINE, _SHARED_LINE = 52, 46


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        group: Heading that it shares with other bars; none if empty.
        note: Its number in words, at the right.
        segments: Style, length and meaning of each; none if only the note is shown.
        low_high: Interval drawn over the bar, with a mark at ``point``.
    """

    group: str
    label: str
    note: str
    segments: tuple[tuple[int, float, str], ...] = ()
    low_high: tuple[float, float] | None = None
    point: float | None = None
    limit: float | None = None


def draw_bars(bars: Sequence[Bar], axis: Axis, meaning: str) -> Drawing:
    """Draws bars from top to bottom, sorted into groups; ``meaning`` labels the axis, with its unit."""
    drawn: list[Markup] = []
    y = 0
    has_two_lines = any(len(bar.label) + len(bar.note) > _SHARED_LINE for bar in bars)
    at = "soft" if has_two_lines else "end"
    for group, members in by(bars, lambda bar: bar.group).items():
        if group:
            drawn.append(words(cut(group, _LINE), 0, y + 17, "heading"))
            y += _HEADING
        for bar in members:
            drawn.append(words(cut(bar.label, _LINE), 0, y + 13, "label"))
            y += _NOTE_ROW * has_two_lines
            drawn.append(words(cut(bar.note, _LINE), 0 if has_two_lines else 1, y + 13, f"label {at}"))
            drawn += _bar(bar, axis, y)
            y += _ROW
    return Drawing(join(axis_along(axis, 0, y, meaning), *drawn), y + TICK_ROOM, is_wide=True)


def _bar(bar: Bar, axis: Axis, y: float) -> list[Markup]:
    top, middle = y + _BAR_TOP, y + _BAR_TOP + _BAR / 2
    drawn: list[Markup] = []
    start = 0.0
    for style, length, meaning in bar.segments:
        x, end = axis.at(start), axis.at(start + length)
        drawn.append(
            tag(
                "rect", tag("title", meaning), x=along(x), y=f"{top:.0f}", width=along(end - x), height=_BAR,
                class_=area(style),
            )
        )  # fmt: skip
        start += length
    if bar.low_high is not None:
        low, high = map(axis.at, bar.low_high)
        drawn.append(line(low, middle, high, middle, "whisker"))
        drawn += [line(x, middle - 4, x, middle + 4, "whisker") for x in (low, high)]
    if bar.limit is not None:
        drawn.append(line(axis.at(bar.limit), top - 3, axis.at(bar.limit), top + _BAR + 3, "limit"))
    if bar.point is not None:
        drawn.append(tag("circle", cx=along(axis.at(bar.point)), cy=middle, r=5, class_="point"))
    return drawn
