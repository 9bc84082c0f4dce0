"""What computing and communicating take from each other where they share something, such as a core.

While both go on, each goes slower: at a rate r of what it does alone. 1 shares nothing, which is the pipeline of
``overlap.py``; 1/2 is as slow as one after the other. It is measured by a compute of a and a communication of b that
need nothing of each other and together take t: the shorter one took min(a, b) / r.

    r = min(a, b) / (t - |a - b|)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .checks import check_not_negative, check_positive


def rate_at_once(compute_s: float, communicate_s: float, together_s: float) -> float:
    """Gives the rate at which computing and communicating go on while both do.

    Args:
        compute_s: a, of a compute alone.
        communicate_s: b, of a communication alone.
        together_s: t, of both, started at once.

    Returns:
        r, at most 1.

    Raises:
        ValueError: If a time is not positive, or both together take no longer than what one leaves to the other.

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
    """Walks the pipeline where computing and communicating slow each other down.

    Args:
        compute_s: Seconds of the whole compute, alone.
        ready_s: As for ``overlap.finish_times_s``, in seconds of the compute alone, ``[buckets]``.
        communicate_s: As for ``overlap.finish_times_s``, alone, ``[buckets]``.
        rate: r, above 0 and at most 1.

    Returns:
        When both have ended.

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
        # What of it goes on beside the compute: each progresses by as much.
        beside = min(left, compute_s - computed)
        computed += beside
        now += beside / rate + left - beside
    return now + compute_s - computed
