"""Algorithm and bus bandwidth of a measured collective, and the latency and rate that fit a sweep of sizes.

As in nccl-tests, algbw divides the bytes S of the whole buffer by the time of a call, and busbw multiplies algbw by
the least that a rank must send as a multiple of S, so that it compares with the link for any number of ranks. A sweep
over sizes is described by

    t(S) = o + S / w        o: seconds per call, w: algbw of large buffers

fitted by least squares of relative errors, ((t_i - o - S_i / w) / t_i)^2: times span three decades, and absolute errors
would count only the largest. With columns 1/t_i and S_i/t_i and right-hand side 1 this is a linear least-squares
problem, whose residual gives the standard errors.

References:
    nccl-tests, doc/PERFORMANCE.md and the bandwidth functions of its sources.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .checks import check_choice, check_count, check_not_negative, check_positive

# Bytes that a rank sends at least, over the bytes S of the whole buffer.
_BUS_FACTORS = {
    "all_reduce": "2(n-1)/n",
    "reduce_scatter": "(n-1)/n",
    "all_gather": "(n-1)/n",
    "alltoall": "(n-1)/n",
    "gather": "(n-1)/n",
    "scatter": "(n-1)/n",
    "broadcast": "1",
    "reduce": "1",
    "sendrecv": "1",
    "hypercube": "1",
}


class Fit(NamedTuple):
    """Latency and rate of a sweep.

    Attributes:
        latency_s: o; negative where the model does not describe the sweep.
        bytes_per_s: w, an algorithm bandwidth.
        latency_error_s: Standard error of o; nan for two points, which any pair fits.
        bytes_per_s_error: Standard error of w, to first order; nan for two points.
        residuals: Fitted over measured time, minus 1, of each point.
    """

    latency_s: float
    bytes_per_s: float
    latency_error_s: float
    bytes_per_s_error: float
    residuals: np.ndarray


def bus_factor(kind: str, num_ranks: Any) -> Any:
    """Computes bus bandwidth over algorithm bandwidth: the least that a rank sends, as a multiple of S.

    Args:
        kind: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"broadcast"``, ``"reduce"``, ``"alltoall"``,
            ``"gather"``, ``"scatter"``, ``"sendrecv"`` or ``"hypercube"``.
        num_ranks: n.

    Raises:
        ValueError: If the kind is unknown or ``num_ranks`` not a positive whole number.

    Example:
        >>> float(bus_factor("all_reduce", 4)), float(bus_factor("broadcast", 4))
        (1.5, 1.0)
    """
    check_choice(_BUS_FACTORS, kind=kind)
    check_count(num_ranks=num_ranks)
    n = np.asarray(num_ranks, float)
    return {"1": np.ones_like(n), "(n-1)/n": (n - 1) / n, "2(n-1)/n": 2 * (n - 1) / n}[_BUS_FACTORS[kind]]


def bandwidths(kind: str, num_bytes: Any, seconds: Any, num_ranks: Any) -> tuple[Any, Any]:
    """Converts the time of one call to ``(algbw, busbw)`` in bytes per second.

    ``num_bytes`` is S, the whole of what the ranks have parts of; the others are as for ``bus_factor``.

    Raises:
        ValueError: As ``bus_factor``, or if the bytes are negative or the time is not positive.
    """
    check_positive(seconds=seconds)
    check_not_negative(num_bytes=num_bytes)
    algbw = np.asarray(num_bytes, float) / seconds
    return algbw, algbw * bus_factor(kind, num_ranks)


def fit_sweep(num_bytes: Any, seconds: Any) -> Fit:
    """Fits ``t = o + S / w`` to a sweep of sizes, by relative error.

    Raises:
        ValueError: If a size is negative, a time not positive, there are fewer than two different sizes, or times do
            not grow with sizes.

    Example:
        >>> fit = fit_sweep([1e6, 2e6, 4e6], [0.002, 0.003, 0.005])
        >>> round(fit.latency_s, 9), round(fit.bytes_per_s / 1e9, 9)
        (0.001, 1.0)
    """
    check_not_negative(num_bytes=num_bytes)
    check_positive(seconds=seconds)
    size, time = np.asarray(num_bytes, float), np.asarray(seconds, float)
    if size.shape != time.shape or size.ndim != 1 or len(set(size)) < 2:
        raise ValueError(f"num_bytes (={num_bytes!r}) must be at least two different sizes, each with its time")
    columns = np.stack([1 / time, size / time], axis=1)
    scale = np.abs(columns).max(axis=0)  # microseconds against gigabytes: normalise both columns
    solution, *_ = np.linalg.lstsq(columns / scale, np.ones_like(time), rcond=None)
    latency, seconds_per_byte = solution / scale
    if seconds_per_byte <= 0:
        raise ValueError(f"seconds (={seconds!r}) must grow with num_bytes")
    residuals = columns @ (latency, seconds_per_byte) - 1
    errors = [math.nan, math.nan]
    if (spare := len(time) - 2) > 0:
        covariance = np.linalg.inv((columns / scale).T @ (columns / scale)) * (residuals @ residuals) / spare
        errors = np.sqrt(np.diag(covariance)) / scale
    return Fit(
        float(latency), float(1 / seconds_per_byte), float(errors[0]), float(errors[1] / seconds_per_byte**2), residuals
    )
