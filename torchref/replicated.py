"""What the four strategies in ``ddp/`` share, and FSDP for the parameters that it does not shard.

Each bucket has a buffer that is kept from step to step and summed in place; the gradients become views of it.

    buffer    = sum over ranks of pack(gradients of the bucket)      all-reduce
    gradients = unpack(buffer / denominator)                         views, no copy
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jaxddp.arguments import check_function
from jaxddp.communication.buckets import Bucket

from .communication.buffers import pack, unpack
from .communication.collectives import record, silent
from .communication.hooks import Hook, all_reduce
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

    def __init__(self, module: nn.Module, *, hook: Hook | None = None, **options: Any) -> None:
        """Wraps a module; ``hook`` sums buckets, see ``communication/hooks.py``. Options as ``DataParallel``."""
        if hook is not None:
            check_function("hook", hook, "a function (buffer, group) -> sum")
        self._hook: Any = all_reduce if hook is None else hook
        super().__init__(module, **options)
        self._buffers_of_buckets = [self._new_buffer(bucket) for bucket in self.plan.buckets]
        self._started: list[tuple[torch.Tensor, Any]] = []  # the total and the handle of each bucket

    def planned_collectives(self, num_microbatches: int) -> list[tuple[str, int]]:
        """One call for each bucket, or what the hook makes of it."""
        with silent(), record() as issued:
            for bucket in self.plan.buckets:
                dtype = getattr(torch, bucket.dtype)
                self._hook(torch.empty(bucket.num_elements, dtype=dtype, device="meta"), self.process_group)
        return [(one.kind, one.num_bytes) for one in issued]

    def start_reduction(self, index: int) -> None:
        """All-reduces a bucket."""
        bucket, buffer = self.plan.buckets[index], self._buffers_of_buckets[index]
        flat = pack(bucket, {tensor.name: self._grad(tensor.name) for tensor in bucket.tensors}, out=buffer)
        found = self._hook(flat.detach(), self.process_group)
        total, work = (found, None) if isinstance(found, torch.Tensor) else found
        if work is not None and self.plan.after_backward:  # naive and flat wait for each call
            work.wait()
        self._started.append((total, work))

    def finish_reductions(self, denominator: Any) -> None:
        """Gradients become views of the buckets' means."""
        for bucket, (total, work) in zip(self.plan.buckets, self._started, strict=True):
            if work is not None and not self.plan.after_backward:
                work.wait()
            for name, grad in unpack(bucket, total.div_(denominator)).items():
                self._trained[name].grad = grad
        for name in self._trained.keys() - self._bucket_of.keys() - self._sharded:
            self._grad(name).div_(denominator)
        self._started = []

    def drop_reductions(self) -> None:
        """Gives the buckets new buffers: collectives in flight may still write to the old ones."""
        for index in range(len(self._started)):
            self._buffers_of_buckets[index] = self._new_buffer(self.plan.buckets[index])
        self._started = []

    def _new_buffer(self, bucket: Bucket) -> torch.Tensor | None:
        """The buffer of a bucket; None for a bucket of one tensor, whose gradient is the buffer."""
        if len(bucket.tensors) == 1:
            return None
        first = self._trained[bucket.tensors[0].name]
        return torch.empty(bucket.num_elements, dtype=first.dtype, device=first.device)
