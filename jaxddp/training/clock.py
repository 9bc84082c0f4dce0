"""The one clock: how a duration is taken, and how many of them are put into words.

JAX and CUDA return before the work is done, so a duration counts only from a moment when nothing is under way to a
moment when the result is there. Everything that prints a time takes it with ``stopwatch`` and sums it up with
``summarize``; a time is a median with the spread beside it, never a mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
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
        """In words, with enough digits to compare by."""
        digits = 0 if self.median_ms >= 100 else 1 if self.median_ms >= 10 else 3
        median, p10, p90 = (f"{value:,.{digits}f}" for value in self)
        return f"median {median} ms (p10 {p10}, p90 {p90})"


def summarize(seconds: Sequence[float]) -> Timings:
    """Sums up durations.

    Args:
        seconds: At least one; percentiles between two of them are interpolated linearly.

    Returns:
        Median, 10th and 90th percentile.

    Raises:
        ValueError: If there are none.

    Example:
        >>> summarize([0.001, 0.002, 0.009]).median_ms
        2.0
    """
    if len(seconds) == 0:
        raise ValueError("seconds (=[]) must hold at least one duration")
    p10, median, p90 = np.percentile(np.asarray(seconds, dtype=np.float64) * 1e3, [10, 50, 90]).tolist()
    return Timings(median, p10, p90)


def stopwatch(
    function: Callable[..., Result], *args: Any, wait: Callable[[Any], Any] = jax.block_until_ready
) -> tuple[Result, float]:
    """Calls a function and says how long its result took.

    The arguments are waited for before the clock starts, so that work begun earlier is not counted.

    Args:
        function: What is timed.
        *args: Its arguments.
        wait: Returns when the value that it is given is there; for PyTorch on a GPU
            ``lambda _: torch.cuda.synchronize()``.

    Returns:
        The result and the duration in seconds.

    Example:
        >>> total, seconds = stopwatch(sum, [1, 2, 3])
        >>> total, seconds > 0
        (6, True)
    """
    wait(args)
    start = time.perf_counter()
    result = function(*args)
    wait(result)
    return result, time.perf_counter() - start
