"""Flat data parallelism: all gradients in one buffer, one all-reduce after the whole backward.

Saves the latency of all calls but one, at the price of copying the gradients into the buffer; still hides nothing.
Each dtype has a buffer of its own.

    calls per step: 1                      bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: latency + all of the bytes
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxddp.communication.buckets import BucketPlan, TensorSpec, plan_buckets

from ..replicated import Replicated
from ..strategy import register


@register("flat")
class FlatDDP(Replicated):
    """One all-reduce of everything, after the whole backward.

    Its options are those of `DataParallel`: ``process_group`` and ``sync``.
    """

    def make_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan:
        """One bucket for each dtype."""
        return plan_buckets(tensors, None, after_backward=True)
