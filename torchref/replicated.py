"""Strategies whose gradients are all-reduced: those in ``ddp/``, and FSDP for the parameters that it does not shard.

Each bucket has a buffer that is kept from step to step and summed in place; the gradients become views of it.

    buffer    = sum over ranks of pack(gradients of the bucket)      all-reduce
    gradients = unpack(buffer / denominator)                         views, no copy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from jaxddp.communication.buckets import Bucket, BucketPlan, TensorSpec, dtype_bytes

from .communication.buffers import pack, unpack
from .communication.low_rank import Memory
from .communication.reduction import ALL_REDUCE
from .strategy import DataParallel


class Replicated(DataParallel):
    """Averages gradients on every rank.

    ======== ==================== =================================
    tensor   on each rank, before on each rank, after
    ======== ==================== =================================
    gradient ``[shape]``, its own ``[shape]``, sum / denominator
    buffer   ``[bucket]``         ``[bucket]``, the same everywhere
    ======== ==================== =================================

    After the synchronisation every ``parameter.grad`` is a view of its bucket's buffer; with
    ``zero_grad(set_to_none=False)`` the next backward accumulates straight into it.
    """

    def __init__(
        self, module: nn.Module, make_plan: Callable[[Sequence[TensorSpec]], BucketPlan], **options: Any
    ) -> None:
        super().__init__(module, make_plan, **options)
        self._bucket_buffers = [self._new_buffer(bucket) for bucket in self.plan.buckets]
        self._started: list[tuple[torch.Tensor, Any]] = []  # the total and the handle of each bucket
        if self.compression.init_state is not None:
            self.memory = {
                tensor.name: Memory(*(part.to(self._trained[tensor.name].device) for part in state))
                for bucket in self.plan.buckets
                for tensor in bucket.tensors
                if (state := self.compression.init_state(tensor)) is not None
            }

    def _planned_collectives(self, num_microbatches: int) -> list[tuple[str, int]]:
        return [
            (ALL_REDUCE.kind, num_elements * dtype_bytes(dtype))
            for bucket in self.plan.buckets
            for num_elements, dtype in self.compression.wire_buffers(bucket, bucket.num_elements)
        ]

    def _start_reduction(self, index: int) -> None:
        bucket, buffer = self.plan.buckets[index], self._bucket_buffers[index]
        flat = pack(bucket, {tensor.name: self._grad(tensor.name) for tensor in bucket.tensors}, out=buffer)
        async_op = not self.plan.after_backward  # naive and flat wait for each call
        self._started.append(self.compression.reduce(flat, self.process_group, async_op, ALL_REDUCE, self._divisor))

    def _finish_reductions(self, denominator: float) -> None:
        for bucket, (total, work) in zip(self.plan.buckets, self._started, strict=True):
            if work is not None:
                work.wait()
            if self.compression.finish is not None:
                changed = self.compression.finish(bucket, total, self.process_group, self.memory, denominator)
                self.memory = {**self.memory, **changed}
            for name, grad in unpack(bucket, total.div_(denominator)).items():
                self._trained[name].grad = grad
        for name in self._trained.keys() - self._bucket_of.keys():
            self._grad(name).div_(denominator)
        self._started = []

    def _drop_reductions(self) -> None:
        for index in range(len(self._started)):  # collectives in flight may still write to the old buffers
            self._bucket_buffers[index] = self._new_buffer(self.plan.buckets[index])
        self._started = []

    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [one.grad.as_subclass(torch.Tensor) for one in self.module.parameters() if one.grad is not None], []

    def _new_buffer(self, bucket: Bucket) -> torch.Tensor | None:
        """The buffer of a bucket; None for a bucket of one tensor, whose gradient is the buffer."""
        if len(bucket.tensors) == 1:
            return None
        first = self._trained[bucket.tensors[0].name]
        return torch.empty(bucket.num_elements, dtype=first.dtype, device=first.device)
