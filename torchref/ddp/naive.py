"""Naive data parallelism: one all-reduce per parameter, after the whole backward.

What everyone writes first. Every parameter pays the latency of a call, and nothing is hidden: the first byte is sent
when the last gradient is ready.

    calls per step: P (parameters)         bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: P * latency + all of the bytes
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxddp.communication.buckets import BucketPlan, TensorSpec, plan_per_tensor

from ..replicated import Replicated
from ..strategy import register


@register("naive")
class NaiveDDP(Replicated):
    """One all-reduce per parameter, after the whole backward.

    Its options are those of `DataParallel`: ``process_group`` and ``sync``.
    """

    def make_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan:
        """Each tensor by itself."""
        return plan_per_tensor(tensors, after_backward=True)
