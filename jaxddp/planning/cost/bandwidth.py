"""What a measured collective says: algorithm and bus bandwidth, and the latency and rate that fit a sweep of sizes.

nccl-tests divides the bytes S of the whole buffer by the time of a call, which is algbw, and multiplies by what a rank
must send at the very least as a multiple of S, which is busbw: that one can be held against the link, whatever the
number of ranks. A sweep over sizes is described by two numbers,

    t(S) = o + S / w        o: seconds per call, w: algbw of large buffers

fitted so that the sum of squared relative errors, ((t_i - o - S_i / w) / t_i)^2, is least: times span three decades,
and a plain fit would see the largest only. With columns 1/t_i and S_i/t_i and the right-hand side 1 it is a linear
least-squares problem, whose residual gives the standard errors.

References:
    nccl-tests, doc/PERFORMANCE.md and the bandwidth functions of its sources.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .checks import check_choice, check_count, check_not_negative, check_positive

# The bytes that nccl-tests divides by the time are the bytes of one rank's part times this ...
_COUNTED = {
    "reduce_scatter": "n",
    "all_gather": "n",
    "alltoall": "n",
    "gather": "n",
    "scatter": "n",
    "hypercube": "n-1",
}
# ... and this makes of the quotient what a rank sends per second at best.
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
        latency_s: o. Below 0 where one pair does not describe the sweep.
        bytes_per_s: w, an algorithm bandwidth.
        latency_error_s: Standard error of o; nan of two points, which any pair fits.
        bytes_per_s_error: Standard error of w, to first order; likewise.
        residuals: Fitted over measured time, less 1, of each point.
    """

    latency_s: float
    bytes_per_s: float
    latency_error_s: float
    bytes_per_s_error: float
    residuals: np.ndarray


def bus_factor(kind: str, num_ranks: Any) -> Any:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines them: busbw = algbw x factor, algbw = S / time.

    Args:
        kind: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"broadcast"``, ``"reduce"``, ``"alltoall"``,
            ``"gather"``, ``"scatter"``, ``"sendrecv"`` or ``"hypercube"``.
        num_ranks: n.

    Returns:
        What a rank sends at the very least, as a multiple of S.

    Raises:
        ValueError: If the kind is unknown or ``num_ranks`` no count.

    Example:
        >>> float(bus_factor("all_reduce", 4)), float(bus_factor("broadcast", 4))
        (1.5, 1.0)
    """
    check_choice(_BUS_FACTORS, kind=kind)
    check_count(num_ranks=num_ranks)
    n = np.asarray(num_ranks, float)
    return {"1": np.ones_like(n), "(n-1)/n": (n - 1) / n, "2(n-1)/n": 2 * (n - 1) / n}[_BUS_FACTORS[kind]]


def counted_bytes(kind: str, rank_bytes: Any, num_ranks: Any) -> Any:
    """S as nccl-tests counts it: the whole of what the ranks have parts of, not one rank's part.

    Args:
        kind: As for ``bus_factor``.
        rank_bytes: Bytes of the smaller of a rank's two buffers.
        num_ranks: n.

    Returns:
        Bytes.

    Raises:
        ValueError: As ``bus_factor``, or if the bytes are negative.
    """
    check_choice(_BUS_FACTORS, kind=kind)
    check_not_negative(rank_bytes=rank_bytes)
    check_count(num_ranks=num_ranks)
    n = np.asarray(num_ranks, float)
    return np.asarray(rank_bytes, float) * {"1": np.ones_like(n), "n": n, "n-1": n - 1}[_COUNTED.get(kind, "1")]


def bandwidths(kind: str, num_bytes: Any, seconds: Any, num_ranks: Any) -> tuple[Any, Any]:
    """Turns a measured time into algorithm and bus bandwidth, bytes per second.

    Args:
        kind: As for ``bus_factor``.
        num_bytes: S, as ``counted_bytes`` gives it.
        seconds: Of one call.
        num_ranks: n.

    Returns:
        ``(algbw, busbw)``.

    Raises:
        ValueError: As ``bus_factor``, or if the bytes are negative or the time is not positive.
    """
    check_positive(seconds=seconds)
    check_not_negative(num_bytes=num_bytes)
    algbw = np.asarray(num_bytes, float) / seconds
    return algbw, algbw * bus_factor(kind, num_ranks)


def fit_sweep(num_bytes: Any, seconds: Any) -> Fit:
    """Fits ``t = o + S / w`` to a sweep of sizes, by relative error.

    Args:
        num_bytes: S of each point, at least two different.
        seconds: t of each point.

    Returns:
        The fit.

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
    scale = np.abs(columns).max(axis=0)  # microseconds and gigabytes: the problem is solved in units of its own
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
