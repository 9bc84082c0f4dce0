"""Overlapped data parallelism: one all-reduce per parameter, as soon as its gradient is ready.

The backward computes the gradients of early layers while those of late layers are reduced. Every parameter still pays
the latency of a call.

    calls per step: P (parameters)         bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: what the remaining backward is too short to hide, and at least the last gradient
"""

from ..communication.buckets import plan_per_tensor
from ..replicated import replicated
from ..strategy import Strategy, register


@register
def overlapped() -> Strategy:
    """One all-reduce per parameter, as its gradient becomes ready."""
    return replicated("overlapped", plan_per_tensor)
