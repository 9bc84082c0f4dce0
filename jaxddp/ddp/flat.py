"""Flat data parallelism: all gradients in one buffer, one all-reduce after the whole backward.

Saves the latency of all calls but one, at the price of copying the gradients into the buffer; still hides nothing.
Each dtype has a buffer of its own.

    calls per step: 1                      bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: latency + all of the bytes
"""

from functools import partial

from ..communication.buckets import plan_buckets
from ..replicated import replicated
from ..strategy import Strategy, register


@register
def flat() -> Strategy:
    """One all-reduce of everything, after the whole backward."""
    return replicated("flat", partial(plan_buckets, bucket_mb=None, after_backward=True))
