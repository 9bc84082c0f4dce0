"""Gradients summed on every rank: what the four strategies of ``ddp/`` share, and FSDP for what it does not shard.

A bucket's buffer is summed in place and stays from step to step; gradients become views of it.

    buffer = sum over ranks of pack(gradients of a bucket)      all-reduce
    gradients = unpack(buffer / denominator)                    views, no copy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from jaxddp.planning.buckets import Bucket, BucketPlan, TensorSpec, dtype_bytes

from .communication.buckets import pack, unpack
from .communication.exchange import WHOLE
from .communication.low_rank import Memory
from .data_parallel import DataParallel


class Replicated(DataParallel):
    """Averages gradients on every rank.

    ======== ==================== =================================
    tensor   on each rank, before on each rank, after
    ======== ==================== =================================
    gradient ``[shape]``, its own ``[shape]``, sum / denominator
    buffer   ``[bucket]``         ``[bucket]``, the same everywhere
    ======== ==================== =================================

    After synchronisation every ``parameter.grad`` is a view of its bucket's buffer; with
    ``zero_grad(set_to_none=False)`` the next backward accumulates straight into it.
    """

    def __init__(
        self, module: nn.Module, make_plan: Callable[[Sequence[TensorSpec]], BucketPlan], **options: Any
    ) -> None:
        """Wraps a module.

        Args:
            module: What to train.
            make_plan: Tensors in the order in which their gradients become ready ``->`` plan.
            **options: Of ``DataParallel``.

        Raises:
            ValueError: As ``DataParallel``.
        """
        super().__init__(module, make_plan, **options)
        self._buffers_of_plan = [self._new_buffer(bucket) for bucket in self.plan.buckets]
        self._sums: list[tuple[torch.Tensor, Any]] = []
        if self.compression.remember is not None:
            self.memory = {
                tensor.name: Memory(*(part.to(self._trained[tensor.name].device) for part in first))
                for bucket in self.plan.buckets
                for tensor in bucket.tensors
                if (first := self.compression.remember(tensor)) is not None
            }

    def planned(self, num_microbatches: int = 1) -> list[tuple[str, int]]:
        """Lists the all-reduces of each bucket: one, unless compression makes them more."""
        return [
            (WHOLE.kind, num_elements * dtype_bytes(dtype))
            for bucket in self.plan.buckets
            for num_elements, dtype in self.compression.wire(bucket, bucket.num_elements)
        ]

    def _launch(self, index: int) -> None:
        bucket, buffer = self.plan.buckets[index], self._buffers_of_plan[index]
        flat = pack(bucket, {tensor.name: self._grad(tensor.name) for tensor in bucket.tensors}, out=buffer)
        in_flight = not self.plan.after_backward  # naive and flat wait for each call, which is what they are
        self._sums.append(self.compression.travel(flat, self.process_group, in_flight, WHOLE))

    def _collect(self) -> None:
        for bucket, (total, work) in zip(self.plan.buckets, self._sums, strict=True):
            if work is not None:
                work.wait()
            for name, view in unpack(bucket, total).items():
                self._trained[name].grad = view

    def _divide(self, denominator: float) -> None:
        for bucket, (total, _) in zip(self.plan.buckets, self._sums, strict=True):
            if self.compression.finish is not None:
                changed = self.compression.finish(bucket, total, self.process_group, self.memory, denominator)
                self.memory = {**self.memory, **changed}
            total.div_(denominator)
        for name in self._trained.keys() - self._bucket_of.keys():
            self._grad(name).div_(denominator)
        self._sums = []

    def _forget(self) -> None:
        for index in range(len(self._sums)):  # what is under way may still write to these
            self._buffers_of_plan[index] = self._new_buffer(self.plan.buckets[index])
        self._sums = []

    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None], []

    def _new_buffer(self, bucket: Bucket) -> torch.Tensor | None:
        """The buffer of a bucket, kept from step to step; None for one tensor, whose own gradient serves."""
        if len(bucket.tensors) == 1:
            return None
        first = self._trained[bucket.tensors[0].name]
        return torch.empty(bucket.num_elements, dtype=first.dtype, device=first.device)
