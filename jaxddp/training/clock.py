"""The one clock: everything that prints a time measures it here, and as a median with its spread, never as a mean."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

Result = TypeVar("Result")


class Timings(NamedTuple):
    """Repeated durations of one thing, in milliseconds.

    Example:
        >>> print(Timings(median_ms=12.34, p10_ms=11.9, p90_ms=15.0))
        median 12.3 ms (p10 11.9, p90 15.0)
    """

    median_ms: float
    p10_ms: float
    p90_ms: float

    def __str__(self) -> str:
        """As text, with enough digits to compare."""
        digits = 0 if self.median_ms >= 100 else 1 if self.median_ms >= 10 else 3
        median, p10, p90 = (f"{value:,.{digits}f}" for value in self)
        return f"median {median} ms (p10 {p10}, p90 {p90})"


def summarize(seconds: Sequence[float]) -> Timings:
    """Gives the median and percentiles, linear between two durations; a ValueError if there are none."""
    if len(seconds) == 0:
        raise ValueError("seconds (=[]) must hold at least one duration")
    p10, median, p90 = np.percentile(np.asarray(seconds, dtype=np.float64) * 1e3, [10, 50, 90]).tolist()
    return Timings(median, p10, p90)


def stopwatch(function: Callable[..., Result], *args: Any) -> tuple[Result, float]:
    """Gives the result of a call, and its seconds. JAX and CUDA return early: what is timed waits for its results."""
    start = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - start
