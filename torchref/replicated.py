"""What the four strategies in ``ddp/`` share, and FSDP for the parameters that it does not shard.

buffer    = sum over ranks of pack(gradients of the bucket)      all-reduce
gradients = unpack(buffer / denominator)                         views, no copy
"""

from typing import Any

import torch
from torch import nn

from jaxddp.communication.buckets import Bucket

from .communication.collectives import record, silent
from .communication.hooks import Hook, all_reduce
from .communication.reduction import pack, unpack
from .strategy import DataParallel


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
