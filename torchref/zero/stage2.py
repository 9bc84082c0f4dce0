"""ZeRO stage 2: gradients are sharded as well.

Stage 1 keeps full gradients until the last micro-batch is reduced. Here each micro-batch reduce-scatters its buckets as
they fill and frees them, and only shards are added up.

    ================ ============================ =========================================
    tensor           on each rank                 bytes on each rank, AdamW, fp32
    ================ ============================ =========================================
    parameter        ``[shape]``                  4 Psi
    gradient         ``[shape]``, in its bucket   the open bucket, and two in flight
    summed gradient  ``[c]``, c = ceil(n/N)       4 Psi / N
    moments          ``[c]`` each                 8 Psi / N
    ================ ============================ =========================================

    over micro-batches a:  g[r] += row r of the sum over ranks of pack(gradients of a)      reduce-scatter
    then as stage 1 does:  p[r] += optimizer(g[r] / (N A), state[r], p[r]);  p = all-gather of p[r]

    calls per step: A + 1 per bucket for A micro-batches      bytes sent per rank: (A + 1) (N-1)/N * parameter bytes

``accumulate="full"`` adds up full gradients and reduces them once, with the speed of stage 1, and its memory up to the
last micro-batch.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from jaxddp.communication.buckets import BucketMb

from ..gradients import PartialGradient
from ..strategy import register
from .stage1 import ZeRO1


@register("zero2")
class ZeRO2(ZeRO1):
    """``ZeRO1`` that frees a gradient as soon as its bucket is packed.

    With ``accumulate="shards"`` every backward communicates, even under ``no_sync``, which then only announces that
    another backward follows. All ranks must run equally many, each through at least one trainable parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        bucket_mb: BucketMb = "default",
        *,
        accumulate: Literal["shards", "full"] = "shards",
        **kwargs: Any,
    ) -> None:
        """Wraps a module.

        ``accumulate="shards"`` communicates in every micro-batch and saves memory; ``"full"`` communicates once and
        saves time. The other arguments are those of ``ZeRO1``.

        Raises:
            ValueError: If ``accumulate`` is neither, or as ``ZeRO1``.
        """
        if accumulate not in ("shards", "full"):
            raise ValueError(f"accumulate (={accumulate!r}) must be 'shards' or 'full'")
        super().__init__(module, optimizer_cls, bucket_mb, **kwargs)
        self.reduces_each_microbatch = accumulate == "shards"

    def _planned_collectives(self, num_microbatches: int) -> list[tuple[str, int]]:
        num_earlier = num_microbatches - 1 if self.reduces_each_microbatch else 0
        return self._planned_reductions() * num_earlier + super()._planned_collectives(num_microbatches)

    def _on_ready(self, name: str) -> None:
        if self.reduces_each_microbatch and isinstance(self._trained[name].grad, PartialGradient):
            self._note_sent(name)  # a change would miss what earlier micro-batches have added
        if self._sync or not self.reduces_each_microbatch or self._waits_for_divisor:
            super()._on_ready(name)
            return
        if not self._ready:
            # Only autograd knows when a backward ends that leaves out some parameters.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        self._count(name)

    def _start_reduction(self, index: int) -> None:
        super()._start_reduction(index)
        for tensor in self.plan.buckets[index].tensors:
            self._trained[tensor.name].grad = self._spent[tensor.name]
            self._note_sent(tensor.name)

    def _end_pass(self) -> None:
        """Accumulates the shards of a backward that another one follows."""
        self._start_all()
        self._accumulate(self._in_flight.wait())
        self._expect_gradients()
        self._has_begun = self._has_spent = True
