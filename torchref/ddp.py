"""Data parallelism with full parameters on every rank: four strategies, which differ in their plans alone.

The twin of ``jaxddp/ddp.py``, which says what each costs. FSDP reduces so what it does not shard.

buffer    = sum over ranks of pack(gradients of the bucket)      all-reduce
gradients = unpack(buffer / denominator)                         views, no copy
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from jaxddp.communication.buckets import (
    Bucket,
    BucketMb,
    BucketPlan,
    Rule,
    TensorSpec,
    plan_all_reduces,
    plan_buckets,
    plan_per_tensor,
)

from .communication.collectives import record, silent
from .communication.hooks import Hook, all_reduce
from .communication.reduction import pack, unpack
from .strategy import DataParallel, register


class Replicated(DataParallel):
    """Averages gradients on every rank; afterwards each is a view of its bucket's buffer, if it is contiguous."""

    def __init__(self, module: nn.Module, *, hook: Hook | None = None, **options: Any) -> None:
        """Wraps a module; ``hook`` sums buckets, see ``communication/hooks.py``. Options as ``DataParallel``."""
        self._hook: Any = all_reduce if hook is None else hook
        self._started: list[tuple[torch.Tensor, Any]] = []  # the total and the handle of each bucket
        super().__init__(module, **options)

    def planned_collectives(self, num_microbatches: int = 1) -> list[tuple[str, int]]:
        """One call for each bucket, or what the hook makes of it."""
        with silent(), record() as issued:
            for bucket in self.plan.buckets:
                dtype = getattr(torch, bucket.dtype)
                self._hook(torch.empty(bucket.num_elements, dtype=dtype, device="meta"), self.process_group)
        return [(one.kind, one.num_bytes) for one in issued]

    def start_reduction(self, bucket: Bucket) -> None:
        """All-reduces a bucket."""
        flat = pack(bucket, {tensor.name: self._grad(tensor.name) for tensor in bucket.tensors})
        found = self._hook(flat.detach(), self.process_group)
        total, work = (found, None) if isinstance(found, torch.Tensor) else found
        if work is not None and self.plan.after_backward:  # naive, flat and FSDP wait for each call
            work.wait()
        self._started.append((total, work))

    def finish_reductions(self, denominator: Any) -> None:
        """Gradients become views of the buckets' means."""
        for bucket, (total, work) in zip(self.plan.buckets, self._started, strict=True):
            if work is not None and not self.plan.after_backward:
                work.wait()
            torch._foreach_div_([total], denominator)  # rounds as below, and as shards do: div_ may not on GPUs
            for name, grad in unpack(bucket, total).items():
                one = self._trained[name]
                # Fused optimizers take a gradient's elements in the order of the parameter's in memory.
                one.grad = grad if grad.stride() == one.stride() else torch.empty_like(one).copy_(grad)
        if alone := [self._grad(name) for name in self._trained.keys() - self._planned - self._sharded]:
            torch._foreach_div_(alone, denominator)  # one kernel for many, which on one rank are all
        self._started = []

    def drop_reductions(self) -> None:
        """Forgets the buckets in flight, whose memory the library keeps until they are done."""
        self._started = []


@register("naive")
class NaiveDDP(Replicated):
    """One all-reduce per parameter, after the whole backward; options as `DataParallel`."""

    make_plan = staticmethod(partial(plan_per_tensor, after_backward=True))


@register("flat")
class FlatDDP(Replicated):
    """One all-reduce of everything, or one per dtype, after the whole backward; options as `DataParallel`."""

    make_plan = staticmethod(partial(plan_buckets, bucket_mb=None, after_backward=True))


@register("overlapped")
class OverlappedDDP(Replicated):
    """One all-reduce per parameter, as its gradient becomes ready; options as `DataParallel`."""

    make_plan = staticmethod(plan_per_tensor)


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
