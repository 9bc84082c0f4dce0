"""The one clock: everything that prints a time measures it here, and as a median with its spread, never as a mean."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Timings(NamedTuple):
    """The median and two percentiles of repeated durations of one thing, in milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    def __str__(self) -> str:
        median, p10, p90 = (f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in self)
        return f"median {median} ms (p10 {p10}, p90 {p90})"


def summarize(seconds: Sequence[float]) -> Timings:
    """Gives the median and percentiles, linear between two durations."""
    p10, median, p90 = (1e3 * np.percentile(seconds, [10, 50, 90])).tolist()
    return Timings(median, p10, p90)


def stopwatch(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Gives the result of a call, and its seconds. JAX and CUDA return early: what is timed waits for its results."""
    start = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - start
