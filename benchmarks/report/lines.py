"""Curves of values over sizes, with whiskers for their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ..harness.values import short
from .axis import Axis
from .figure import TICK_ROOM, Drawing, Figure, Key, axis_along, colored, line, marker, stroke, words
from .markup import join, tag

_TOP, _HEIGHT = 24, 220  # pixels


class Point(NamedTuple):
    """A value at a size, with its spread if it has one."""

    x: float
    y: float
    low_high: tuple[float, float] | None = None


@dataclass(frozen=True)
class Curve:
    """One curve; related curves share a style, and computed ones are dashed."""

    name: str
    style: int
    points: Sequence[Point]
    is_dashed: bool = False

    @property
    def ends(self) -> tuple[Point, Point]:
        """Its points with the smallest and the largest x."""
        return min(self.points, key=lambda point: point.x), max(self.points, key=lambda point: point.x)


def values_of(curves: Sequence[Curve]) -> list[float]:
    """The values of curves and the ends of their spreads."""
    return [value for curve in curves for point in curve.points for value in (point.y, *(point.low_high or ()))]


def curve_figure(title: str, description: str, curves: Sequence[Curve], *axes: Any) -> Figure:
    """Makes a figure of curves and its legend; arguments as for ``draw_curves``."""
    keys = [Key(curve.name, curve.style, is_line=True, is_dashed=curve.is_dashed) for curve in curves]
    return Figure(title, description, draw_curves(curves, *axes), tuple(keys))


def draw_curves(
    curves: Sequence[Curve], x_axis: Axis, y_axis: Axis, x_means: str, y_means: str, marked: Sequence[float] = ()
) -> Drawing:
    """Draws curves; later ones cover earlier ones, and values of x in ``marked`` get a vertical line."""
    bottom = _TOP + _HEIGHT

    def height_of(value: float) -> float:
        return bottom - _HEIGHT * y_axis.at(value)

    drawn = [
        words(y_means, 0, 12, "tick", dx=-44),
        *(line(0, height_of(tick), 1, height_of(tick), "grid") for tick in y_axis.ticks),
        *(words(y_axis.form(tick), 0, height_of(tick) + 4, "tick end", dx=-6) for tick in y_axis.ticks),
        axis_along(x_axis, _TOP, bottom, x_means),
        *(line(x_axis.at(x), _TOP, x_axis.at(x), bottom, "marked") for x in marked),
    ]
    for curve in curves:
        points = sorted(curve.points, key=lambda point: point.x)
        places = [(x_axis.at(point.x), height_of(point.y)) for point in points]
        spreads = [
            (x, *map(height_of, point.low_high))
            for point, (x, _) in zip(points, places, strict=True)
            if point.low_high is not None
        ]
        names = [f"{curve.name}: {short(point.y)} at {x_axis.form(point.x)}" for point in points]
        drawn += [
            tag("g", *(line(*one, *two) for one, two in pairwise(places)), class_=stroke(curve.style, curve.is_dashed)),
            tag("g", *(line(x, low, x, high) for x, low, high in spreads), class_=stroke(curve.style)),
            tag(
                "g", *(marker(curve.style, *place, name) for place, name in zip(places, names, strict=True)),
                class_=colored(curve.style),
            ),
        ]  # fmt: skip
    return Drawing(join(*drawn), bottom + TICK_ROOM)
