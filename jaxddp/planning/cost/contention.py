"""Compute and communication that share a resource, such as a core, and slow each other down.

While both run, each progresses at a rate r of what it does alone: 1 shares nothing (the pipeline of ``overlap.py``),
1/2 is as slow as running one after the other. To measure it, run a compute of a seconds and a communication of b
seconds together; if that takes t seconds, the shorter one took min(a, b) / r:

    r = min(a, b) / (t - |a - b|)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .checks import check_not_negative, check_positive


def rate_at_once(compute_s: float, communicate_s: float, together_s: float) -> float:
    """Computes r, at most 1, from measured times: a and b alone, and t of both started at once.

    Raises:
        ValueError: If a time is not positive, or ``together_s`` is not above the difference of the other two.

    Example:
        >>> rate_at_once(2.0, 1.0, 3.0), rate_at_once(2.0, 1.0, 2.0)
        (0.5, 1.0)
    """
    check_positive(compute_s=compute_s, communicate_s=communicate_s, together_s=together_s)
    shared_s = together_s - abs(compute_s - communicate_s)
    if shared_s <= 0:
        raise ValueError(f"together_s (={together_s:g}) must be more than {abs(compute_s - communicate_s):g}")
    return min(1.0, min(compute_s, communicate_s) / shared_s)


def shared_finish_s(compute_s: float, ready_s: Any, communicate_s: Any, rate: float) -> float:
    """Computes when compute and all buckets have ended, if they slow each other down.

    Args:
        compute_s: Seconds of the whole compute, alone.
        ready_s: When each bucket is ready, in seconds of the compute alone, ``[buckets]`` in launch order.
        communicate_s: Seconds to send each bucket, alone, ``[buckets]``.
        rate: r, above 0 and at most 1.

    Raises:
        ValueError: If a number is out of range, or a bucket is ready after the compute ends.

    Example:
        >>> [shared_finish_s(3.0, [1.0, 3.0], [1.0, 1.0], rate) for rate in (1.0, 0.5)]
        [4.0, 5.0]
    """
    check_not_negative(ready_s=ready_s, communicate_s=communicate_s)
    ready, send = np.asarray(ready_s, float), np.asarray(communicate_s, float)
    if not 0 < rate <= 1:
        raise ValueError(f"rate (={rate:g}) must be above 0 and at most 1")
    if (late := float(ready.max())) > compute_s * (1 + 1e-9):
        raise ValueError(f"ready_s (={late:g}) must be at most compute_s (={compute_s:g})")
    now = computed = 0.0
    for bucket_ready, left in zip(ready.tolist(), send.tolist(), strict=True):
        if computed < bucket_ready:
            now, computed = now + bucket_ready - computed, bucket_ready
        overlapped = min(left, compute_s - computed)  # compute and communication progress equally
        computed += overlapped
        now += overlapped / rate + left - overlapped
    return now + compute_s - computed
