"""What takes turns in PyTorch: a strategy's copy of the training run, and probes of what it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.communication import compression
from torchref.communication.collectives import record
from torchref.models import loss_fn
from torchref.strategy import planned_collectives

from .interleaving import Variant
from .measure import AT_ONCE, FORWARD_BACKWARD, NUM_PROBED, StepMetrics, StrategySpec, TrainingSetup, all_reduce_label

TorchBatch = dict[str, torch.Tensor]


def adamw(setup: TrainingSetup) -> dict[str, Any]:
    """Arguments of torch's AdamW: one kernel for all parameters, as XLA makes of optax's."""
    return {"lr": setup.learning_rate, "weight_decay": 0.01, "fused": True}


def in_float32(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies tensors to NumPy, which has no bfloat16."""
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
        for name, tensor in tensors.items()
    }


def wrap(setup: TrainingSetup, spec: StrategySpec, module: nn.Module, wire: compression.Compression) -> nn.Module:
    """Wraps a module in a strategy of torchref."""
    options: dict[str, Any] = {} if spec.bucket_mb is None else {"bucket_mb": spec.bucket_mb}
    if torchref.STRATEGIES[spec.name].owns_optimizer:
        options |= {"optimizer_cls": torch.optim.AdamW, **adamw(setup)}
    return torchref.make_strategy(spec.name, module, compression=wire, **options)


class Planned:
    """A strategy's own copy of the training run; without a strategy, single-process training.

    Attributes are those of `Measured`; what is found was issued in the last step.
    """

    schedule = None

    def __init__(self, setup: TrainingSetup, net: nn.Module, batches: Sequence[TorchBatch]) -> None:
        """Starts the run of a module, or of a strategy around it, on this rank's rows of each batch."""
        self._net, self._batches = net, batches
        parallel = net if isinstance(net, torchref.DataParallel) else None
        self._module = parallel.module if parallel else net
        self.planned: list[tuple[str, int]] | None = planned_collectives(parallel) if parallel else []
        self.found: list[tuple[str, int]] | None = []
        self.buckets = [
            [(tensor.name, tensor.num_bytes) for tensor in bucket.tensors]
            for bucket in (parallel.plan.buckets if parallel else ())
        ]
        owns_optimizer = parallel is not None and parallel.owns_optimizer
        optimizer: Any = net if owns_optimizer else torch.optim.AdamW(self._module.parameters(), **adamw(setup))
        self._parallel, self._optimizer = parallel, optimizer
        self._trainer = torchref.Trainer(loss_fn, optimizer, net)

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the whole parameters, in float32; every rank must ask."""
        return in_float32(self._parallel.gather_full_params() if self._parallel else self._module.state_dict())

    def step(self, index: int) -> StepMetrics:
        """Takes the step of a round."""
        with record() as issued:
            metrics = self._trainer.step(self._batches[index])
        self.found = [(one.kind, one.num_bytes) for one in issued]
        return StepMetrics(metrics["loss"], metrics["grad_norm"])

    def start(self, index: int) -> torch.Tensor:
        """Starts the step of a round without its loss over ranks, which the trainer reads: the gradient norm."""
        assert self._parallel is not None
        self._net.zero_grad(set_to_none=True)
        loss_fn(self._net, self._batches[index]).backward()
        self._parallel.finish_gradient_synchronization()
        norm = self._parallel.grad_norm()
        self._optimizer.step()
        return norm


def probes(setup: TrainingSetup, module: nn.Module, batches: Sequence[TorchBatch]) -> list[Variant]:
    """Makes probes of the components of a step: forward and backward alone, all-reduces alone, and both at once."""
    device = next(module.parameters()).device

    def forward_backward(index: int) -> None:
        module.zero_grad(set_to_none=True)
        loss_fn(module, batches[index]).backward()

    variants = [Variant(FORWARD_BACKWARD, forward_backward)]
    for num_bytes in setup.probe_bytes:
        buffers = [torch.zeros(num_bytes // 4, device=device) for _ in range(NUM_PROBED)]

        def all_reduce(index: int, buffers: list[torch.Tensor] = buffers) -> None:
            del index
            for buffer in buffers:
                dist.all_reduce(buffer)

        variants.append(Variant(all_reduce_label(num_bytes), all_reduce))
    beside = [torch.zeros(setup.probe_bytes[-2] // 4, device=device) for _ in range(NUM_PROBED)]

    def at_once(index: int) -> None:
        under_way = [dist.all_reduce(buffer, async_op=True) for buffer in beside]
        forward_backward(index)
        for one in under_way:
            one.wait()

    return [*variants, Variant(AT_ONCE, at_once)]
