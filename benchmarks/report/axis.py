"""Axes: the position of a value between two ends, and the tick values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..harness.values import plain

_MOST_TICKS = 6


@dataclass(frozen=True)
class Axis:
    """A scale from ``low`` to ``high``.

    Attributes:
        ticks: Labelled values, ascending.
        form: Formats a tick.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False
    form: Callable[[float], str] = plain

    def at(self, value: float) -> float:
        """The position of a value: 0 at the start, 1 at the end; values outside are clipped."""
        inside = min(max(value, self.low), self.high)
        low, high, inner = (math.log(x) if self.is_log else x for x in (self.low, self.high, inside))
        return (inner - low) / (high - low)


def linear(values: Iterable[float], form: Callable[[float], str] = plain, start: float = 0.0) -> Axis:
    """Makes an axis from ``start``, or from a smaller value, to the largest value.

    Example:
        >>> linear([3, 17]).ticks
        (0.0, 5.0, 10.0, 15.0)
    """
    values = list(values)
    low, high = min([start, *values]), max([start, *values])
    if high <= low:
        high = low + 1.0
    rough = (high - low) / (_MOST_TICKS - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(round(index * step, 12) for index in range(first, last + 1)), form=form)


def logarithmic(
    values: Iterable[float], form: Callable[[float], str] = plain, ticks: Iterable[float] | None = None
) -> Axis:
    """Makes a logarithmic axis with at most six ticks; values that are not positive are ignored.

    ``ticks`` are the allowed tick values; by default powers of ten, or values between them on a short axis.

    Example:
        >>> logarithmic([3, 40000]).ticks
        (10.0, 100.0, 1000.0, 10000.0)
    """
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    room = (high / low) ** 0.04 if high > low else 2.0
    low, high = low / room, high * room
    if ticks is None:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if high / low < 100 else (1,)
        ticks = (factor * 10.0**decade for decade in decades for factor in factors)
        if high / low < 4:
            ticks = linear([low, high], start=low).ticks
    inside = sorted({float(tick) for tick in ticks if low <= tick <= high})
    every = math.ceil(len(inside) / _MOST_TICKS)
    return Axis(low, high, tuple(inside[:: max(every, 1)]), is_log=True, form=form)
