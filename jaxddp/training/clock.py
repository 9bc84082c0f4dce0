"""The one clock: how durations are measured and summarised.

JAX and CUDA return before the work is done, so the clock starts when no work is pending and stops when the result is
ready. Everything that prints a time measures it with ``stopwatch`` and summarises it with ``summarize``: a median with
its spread, never a mean.
"""

from __future__ import annotations

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
    """Summarises durations.

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


def _wait_for_jax(value: Any) -> Any:
    import jax  # not above: programs of torch use this clock as well

    return jax.block_until_ready(value)


def stopwatch(
    function: Callable[..., Result], *args: Any, wait: Callable[[Any], Any] = _wait_for_jax
) -> tuple[Result, float]:
    """Calls a function and measures the time until its result is ready.

    It waits for the arguments before the clock starts, so that earlier work is not counted.

    Args:
        function: The function to time.
        *args: Its arguments.
        wait: Blocks until a value is ready; for PyTorch on a GPU
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
