"""How much communication is exposed: gradient buckets as an in-order pipeline, and the best number of buckets.

Buckets are sent over one stream, in order. Bucket i takes c_i to compute and ``m_i = s_i / w + o`` to send: s_i bytes
at an algorithm bandwidth w (bytes of the buffer over time, not the bytes that a rank transmits), and o per call.

    R_i = R_{i-1} + c_i          its gradients are ready
    S_i = max(R_i, E_{i-1})      it starts: gradients ready and stream free
    E_i = S_i + m_i              it ends;  the step waits for T = E_n - R_n

Unrolled, ``E_n = max_k (c_1 + ... + c_k + m_k + ... + m_n)``: some bucket k starts the moment it is ready, and the
stream is never idle after that. For n equal buckets of s/n bytes and C/n seconds the maximum is at k = 1 or k = n,
since the sum is linear in k:

    T(n) = max( C/n + s/w + n o - C ,  s/(n w) + o )

The first term falls and rises again, the second falls. So the best n is the minimum of the first term, sqrt(C/o), or
the crossing of the two, (C - s/w)/o, whichever is greater:

    communication-bound, s/w >= C:   n* = sqrt(C/o)                          T* = s/w - C + 2 sqrt(C o)
    compute-bound, s/w < C:          n* = max(sqrt(C/o), (C - s/w)/o)        T* = s/(n* w) + o, in the latter case

A known special case assumes that computing a bucket takes as long as sending it without latency, C = s/w, so

    T(n) = s/(n w) + n o        n* = sqrt(s/(w o))        b* = s/n* = sqrt(s w o)        T* = 2 sqrt(s o / w)

If computing a bucket takes s/(n w) + o instead, all latencies but the last are hidden, T(n) = s/(n w) + o always falls,
and there is no best n. Where communication takes longer than the backward, the optimum does not depend on w.

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
    Stanford CS336 (2025), assignment 2, ddp_bucketed_benchmarking, for the special case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .checks import check_count, check_not_negative, check_positive

COMMUNICATION_BOUND = "communication-bound"
COMPUTE_BOUND = "compute-bound"


class Optimum(NamedTuple):
    """The best number of equal buckets, as a real number.

    Attributes:
        num_buckets: n*.
        bucket_bytes: b* = s / n*.
        tail_s: T(n*), exposed time after the last gradient.
        regime: ``"communication-bound"`` or ``"compute-bound"``.
    """

    num_buckets: float
    bucket_bytes: float
    tail_s: float
    regime: str


def finish_s(ready_s: Any, communicate_s: Any) -> Any:
    """Computes the end of the last bucket, in closed form: the maximum of R_k + m_k + ... + m_n.

    Args:
        ready_s: When the gradients of each bucket are ready, ``[..., buckets]`` in launch order. A bucket starts after
            those before it, even if it is ready earlier.
        communicate_s: Seconds to send each bucket, ``[..., buckets]``.

    Raises:
        ValueError: If a time is negative or there are no buckets.

    Example:
        >>> float(finish_s([1.0, 2.0, 3.0], [2.0, 0.5, 0.5]))
        4.0
    """
    if not np.size(ready_s):
        raise ValueError(f"ready_s (={ready_s!r}) must be a list of at least one bucket")
    check_not_negative(ready_s=ready_s, communicate_s=communicate_s)
    ready, send = np.broadcast_arrays(np.asarray(ready_s, float), np.asarray(communicate_s, float))
    if ready.ndim == 0:
        raise ValueError(f"ready_s (={ready_s!r}) must be a list of at least one bucket")
    ready = np.maximum.accumulate(ready, axis=-1)
    return (ready + np.cumsum(send[..., ::-1], axis=-1)[..., ::-1]).max(axis=-1)


def bucket_times_s(
    buckets: Sequence[Sequence[int]], tensor_bytes: Any, tensor_ready_s: Any, bytes_per_s: float, latency_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Computes when each real bucket is ready and how long it takes to send; whole tensors make sizes uneven.

    ``buckets`` are the indices of the tensors of each, in launch order; the gradient of a tensor has ``tensor_bytes``
    and is ready at ``tensor_ready_s``. The others are w and o.

    Returns:
        ``(ready_s, communicate_s)``, each ``[buckets]``, for ``finish_s``.

    Raises:
        ValueError: If a number is out of range or a bucket is empty.
    """
    check_not_negative(tensor_bytes=tensor_bytes, tensor_ready_s=tensor_ready_s, latency_s=latency_s)
    check_positive(bytes_per_s=bytes_per_s)
    sizes, ready = np.asarray(tensor_bytes, float), np.asarray(tensor_ready_s, float)
    check_count(tensors_per_bucket=[len(bucket) for bucket in buckets])
    places = [list(bucket) for bucket in buckets]
    return (
        np.array([ready[place].max() for place in places]),
        np.array([sizes[place].sum() for place in places]) / bytes_per_s + latency_s,
    )


def uniform_tail_s(compute_s: Any, num_bytes: Any, num_buckets: Any, bytes_per_s: Any, latency_s: Any) -> Any:
    """Computes T(n) for equal buckets from C, s, n, w and o; every argument may be an array.

    C is that of the whole backward, s are the bytes of all gradients; n need not be whole.
    """
    check_not_negative(compute_s=compute_s, num_bytes=num_bytes, latency_s=latency_s)
    check_positive(bytes_per_s=bytes_per_s, num_buckets=num_buckets)
    n, send_s = np.asarray(num_buckets, float), np.divide(num_bytes, bytes_per_s)
    return np.maximum(compute_s / n + send_s + n * latency_s - compute_s, send_s / n + latency_s)


def uniform_optimum(compute_s: float, num_bytes: float, bytes_per_s: float, latency_s: float) -> Optimum:
    """Computes the best number of equal buckets, at least one, in either regime; from C, s, w and o.

    Raises:
        ValueError: If a number is not positive: without latency or compute there is no finite optimum.

    Example:
        >>> best = uniform_optimum(compute_s=0.1, num_bytes=2e9, bytes_per_s=1e10, latency_s=1e-3)
        >>> round(best.num_buckets, 6), round(best.tail_s, 6), best.regime
        (10.0, 0.12, 'communication-bound')
    """
    check_positive(compute_s=compute_s, num_bytes=num_bytes, bytes_per_s=bytes_per_s, latency_s=latency_s)
    send_s = num_bytes / bytes_per_s
    best = max(1.0, math.sqrt(compute_s / latency_s), (compute_s - send_s) / latency_s)
    tail_s = float(uniform_tail_s(compute_s, num_bytes, best, bytes_per_s, latency_s))
    return Optimum(best, num_bytes / best, tail_s, COMMUNICATION_BOUND if send_s >= compute_s else COMPUTE_BOUND)
