"""How much communication shows: gradient buckets as an in-order pipeline, and the number of buckets that is best.

Buckets are sent over one stream, in order. Bucket i takes c_i to compute and ``m_i = s_i / w + o`` to send: s_i bytes
at an algorithm bandwidth w (the buffer's bytes over the time, not what a rank transmits), and o per call.

    R_i = R_{i-1} + c_i          its gradients are ready
    S_i = max(R_i, E_{i-1})      it is sent: ready, and the stream is free
    E_i = S_i + m_i              it has arrived;  the step waits for T = E_n - R_n

Unrolled, ``E_n = max_k (c_1 + ... + c_k + m_k + ... + m_n)``: some bucket k starts the moment it is ready, and the
stream is never idle after that. For n equal buckets of s/n bytes and C/n seconds only k = 1 and k = n can be the
greatest, since the sum is linear in k:

    T(n) = max( C/n + s/w + n o - C ,  s/(n w) + o )

The first term falls and rises again, the second falls. So the best n is where the first is least, sqrt(C/o), or where
the two cross, (C - s/w)/o, whichever is greater:

    communication-bound, s/w >= C:   n* = sqrt(C/o)                          T* = s/w - C + 2 sqrt(C o)
    compute-bound, s/w < C:          n* = max(sqrt(C/o), (C - s/w)/o)        T* = s/(n* w) + o, if the latter

A known special case puts the compute of a bucket at s/(n w), what sending it takes without its latency: C = s/w, so

    T(n) = s/(n w) + n o        n* = sqrt(s/(w o))        b* = s/n* = sqrt(s w o)        T* = 2 sqrt(s o / w)

It holds for that reading only. If the compute of a bucket is s/(n w) + o, all overheads but the last are hidden,
T(n) = s/(n w) + o falls for ever, and there is no best n. And where communication takes longer than the backward, w is
not in the optimum at all.

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
        tail_s: T(n*), what a step waits for after its last gradient.
        regime: ``"communication-bound"`` or ``"compute-bound"``.
    """

    num_buckets: float
    bucket_bytes: float
    tail_s: float
    regime: str


class Exposure(NamedTuple):
    """How much of a step's communication shows, from two measured steps.

    Attributes:
        exposed_s: The step less the same step without communication.
        exposed_share: Of the step.
        hidden_s: The communication that does not show.
        hidden_share: Of the communication.
    """

    exposed_s: Any
    exposed_share: Any
    hidden_s: Any
    hidden_share: Any


def exposure(step_s: Any, compute_s: Any, communication_s: Any) -> Exposure:
    """Tells exposed from hidden communication, by subtraction: a timer inside an overlapped step can tell neither.

    Args:
        step_s: Seconds of a step.
        compute_s: Of the same step with its communication removed.
        communication_s: Of its communication alone.

    Returns:
        The exposure.

    Raises:
        ValueError: If a time is not positive.
    """
    check_positive(step_s=step_s, compute_s=compute_s, communication_s=communication_s)
    exposed = np.subtract(step_s, compute_s)
    hidden = communication_s - exposed
    return Exposure(exposed, exposed / step_s, hidden, hidden / communication_s)


def finish_times_s(ready_s: Any, communicate_s: Any) -> np.ndarray:
    """Walks the pipeline: when each bucket has arrived.

    Args:
        ready_s: When the gradients of each bucket are ready, ``[..., buckets]`` in launch order. A bucket is not
            launched before those in front of it, so one that is ready early waits.
        communicate_s: Seconds that each takes to send, ``[..., buckets]``.

    Returns:
        E, ``[..., buckets]``.

    Raises:
        ValueError: If a time is negative or there are no buckets.

    Example:
        >>> finish_times_s([1.0, 2.0, 3.0], [2.0, 0.5, 0.5]).tolist()
        [3.0, 3.5, 4.0]
    """
    ready, send = _checked(ready_s, communicate_s)
    ends, end = np.empty(ready.shape), np.zeros(ready.shape[:-1])
    for index in range(ready.shape[-1]):
        end = np.maximum(ready[..., index], end) + send[..., index]
        ends[..., index] = end
    return ends


def finish_s(ready_s: Any, communicate_s: Any) -> Any:
    """Gives the end of the last bucket in closed form: the greatest of R_k + m_k + ... + m_n.

    Args:
        ready_s: As for ``finish_times_s``.
        communicate_s: As for ``finish_times_s``.

    Returns:
        E_n, ``[...]``.

    Raises:
        ValueError: As ``finish_times_s``.
    """
    ready, send = _checked(ready_s, communicate_s)
    return (ready + np.cumsum(send[..., ::-1], axis=-1)[..., ::-1]).max(axis=-1)


def bucket_times_s(
    buckets: Sequence[Sequence[int]], tensor_bytes: Any, tensor_ready_s: Any, bytes_per_s: float, latency_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Gives what a real composition of buckets needs of the pipeline: when each is ready, and how long it takes.

    Counts are quantised by tensors: the number of buckets is not the bytes over the cap, and their sizes differ.

    Args:
        buckets: Of each bucket, in launch order, the places of its tensors.
        tensor_bytes: Bytes of each tensor's gradient.
        tensor_ready_s: When each tensor's gradient is ready.
        bytes_per_s: w.
        latency_s: o.

    Returns:
        ``(ready_s, communicate_s)``, each ``[buckets]``, for ``finish_times_s`` and ``finish_s``.

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
    """T(n) of equal buckets.

    Args:
        compute_s: C, seconds of the whole backward; a number or an array, as all others.
        num_bytes: s, bytes of all gradients.
        num_buckets: n, 1 or more; need not be whole.
        bytes_per_s: w.
        latency_s: o.

    Returns:
        Seconds from the last gradient to the end of the last bucket.

    Raises:
        ValueError: If a number is out of range.
    """
    check_not_negative(compute_s=compute_s, num_bytes=num_bytes, latency_s=latency_s)
    check_positive(bytes_per_s=bytes_per_s, num_buckets=num_buckets)
    n, send_s = np.asarray(num_buckets, float), np.divide(num_bytes, bytes_per_s)
    return np.maximum(compute_s / n + send_s + n * latency_s - compute_s, send_s / n + latency_s)


def uniform_optimum(compute_s: float, num_bytes: float, bytes_per_s: float, latency_s: float) -> Optimum:
    """Gives the best number of equal buckets, in whichever regime the step is.

    Args:
        compute_s: C.
        num_bytes: s.
        bytes_per_s: w.
        latency_s: o.

    Returns:
        The optimum; not below one bucket.

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


def handout_tail_s(num_bytes: Any, num_buckets: Any, bytes_per_s: Any, latency_s: Any) -> Any:
    """T(n) = s/(n w) + n o of the special case C = s/w.

    Args:
        num_bytes: s.
        num_buckets: n.
        bytes_per_s: w.
        latency_s: o.

    Returns:
        Seconds.

    Raises:
        ValueError: If a number is out of range.
    """
    check_positive(bytes_per_s=bytes_per_s)
    return uniform_tail_s(np.divide(num_bytes, bytes_per_s), num_bytes, num_buckets, bytes_per_s, latency_s)


def handout_optimum(num_bytes: float, bytes_per_s: float, latency_s: float) -> Optimum:
    """Gives n* = sqrt(s/(w o)), b* = sqrt(s w o) and T* = 2 sqrt(s o / w) of the special case C = s/w.

    Args:
        num_bytes: s.
        bytes_per_s: w.
        latency_s: o.

    Returns:
        The optimum.

    Raises:
        ValueError: If a number is not positive.
    """
    check_positive(bytes_per_s=bytes_per_s)
    return uniform_optimum(num_bytes / bytes_per_s, num_bytes, bytes_per_s, latency_s)


def best_whole_number(
    optimum: Optimum, compute_s: float, num_bytes: float, bytes_per_s: float, latency_s: float
) -> int:
    """Gives the best whole number of equal buckets: the one below n* or the one above."""
    below = max(1, math.floor(optimum.num_buckets))
    tails = uniform_tail_s(compute_s, num_bytes, np.array([below, below + 1]), bytes_per_s, latency_s)
    return below + int(tails[1] < tails[0])


def _checked(ready_s: Any, communicate_s: Any) -> tuple[np.ndarray, np.ndarray]:
    check_not_negative(ready_s=ready_s, communicate_s=communicate_s)
    ready, send = np.broadcast_arrays(np.asarray(ready_s, float), np.asarray(communicate_s, float))
    if ready.ndim == 0 or ready.shape[-1] == 0:
        raise ValueError(f"ready_s (={ready_s!r}) must be a list of at least one bucket")
    return np.maximum.accumulate(ready, axis=-1), send
