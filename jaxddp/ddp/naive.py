"""Naive data parallelism: one all-reduce per parameter, after the whole backward.

What everyone writes first. Every parameter pays the latency of a call, and nothing is hidden: the first byte is sent
when the last gradient is ready.

    calls per step: P (parameters)         bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: P * latency + all of the bytes
"""

from functools import partial

from ..communication.buckets import plan_per_tensor
from ..replicated import replicated
from ..strategy import Strategy, register


@register
def naive() -> Strategy:
    """One all-reduce per parameter, after the whole backward."""
    return replicated("naive", partial(plan_per_tensor, after_backward=True))
