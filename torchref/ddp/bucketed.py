"""Bucketed data parallelism; the twin of ``jaxddp/ddp/bucketed.py``, which says what it costs."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from jaxddp.communication.buckets import BucketMb, BucketPlan, Rule, TensorSpec, plan_all_reduces

from ..replicated import Replicated
from ..strategy import register


@register("bucketed")
class BucketedDDP(Replicated):
    """One all-reduce per bucket, as the bucket fills."""

    def __init__(
        self,
        module: nn.Module,
        bucket_mb: BucketMb = "default",
        *,
        rule: Rule = "before",
        bucket_size_mb: BucketMb = "default",
        **options: Any,
    ) -> None:
        """Wraps a module.

        Args:
            module: What to train.
            bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_all_reduces``.
            rule: When a bucket closes; see ``plan_buckets``.
            bucket_size_mb: Another name of ``bucket_mb``.
            **options: Of ``Replicated`` and ``DataParallel``.
        """
        if "default" not in (bucket_mb, bucket_size_mb):
            raise ValueError(f"bucket_mb (={bucket_mb!r}) and bucket_size_mb (={bucket_size_mb!r}) are one: give one")
        self._bucket_mb, self._rule = bucket_mb if bucket_size_mb == "default" else bucket_size_mb, rule
        super().__init__(module, **options)

    def make_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan:
        """Buckets up to the cap."""
        return plan_all_reduces(tensors, self._bucket_mb, rule=self._rule)
