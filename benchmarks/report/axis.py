"""Axes: where a value lies between the two ends of one, and which values are written at it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..harness.values import plain

_MOST_TICKS = 6


@dataclass(frozen=True)
class Axis:
    """A scale.

    Attributes:
        low: The value at its start.
        high: At its end, above ``low``.
        ticks: The values written at it, ascending.
        is_log: Whether equal ratios are equally long, not equal differences.
        form: How a value is written.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False
    form: Callable[[float], str] = plain

    def at(self, value: float) -> float:
        """Where a value lies: 0 at the start, 1 at the end, and never beyond them."""
        low, high, inner = (math.log(x) if self.is_log else x for x in (self.low, self.high, max(value, self._least)))
        return min(max((inner - low) / (high - low), 0.0), 1.0)

    @property
    def _least(self) -> float:
        return self.low if self.is_log else -math.inf


def linear(values: Iterable[float], form: Callable[[float], str] = plain, start: float = 0.0) -> Axis:
    """Makes an axis from zero, or another start, to the largest value.

    Args:
        values: What has to fit.
        form: How ticks are written.
        start: Where it starts, unless a value lies below.

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
    """Makes an axis on which decades are equally long.

    Args:
        values: What has to fit; those that are not positive do not.
        form: How ticks are written.
        ticks: What may be written at it; powers of ten when None, or what is between where there are few.

    Returns:
        The axis, with at most six of the ticks.

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
