"""Overlapped data parallelism: one all-reduce per parameter, as soon as its gradient is ready.

The backward computes the gradients of early layers while those of late layers are reduced. Every parameter still pays
the latency of a call.

    calls per step: P (parameters)         bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: what the remaining backward is too short to hide, and at least the last gradient
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxddp.communication.buckets import BucketPlan, TensorSpec, plan_per_tensor

from ..replicated import Replicated
from ..strategy import register


@register("overlapped")
class OverlappedDDP(Replicated):
    """One all-reduce per parameter, as its gradient becomes ready.

    Its options are those of `DataParallel`: ``process_group`` and ``sync``.
    """

    def make_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan:
        """Each tensor by itself, as it is ready."""
        return plan_per_tensor(tensors)
