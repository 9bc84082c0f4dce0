"""PyTorch's own data parallelism, to be compared with, in the loop that its documentation shows.

| name                      | what it is                                                  | without communication      |
|---------------------------|-------------------------------------------------------------|----------------------------|
| `DistributedDataParallel` | all-reduces of buckets                                      | a hook that sends nothing  |
| `torch.compile`           | the same, compiled: its graph is cut where buckets end      | not run: compiled twice    |
| `ZeroRedundancyOptimizer` | the same, and an optimizer whose state is sharded by tensor | not run: it has no hook    |
| `fully_shard`             | FSDP2: a layer is a unit, the rest is another               | not run: it has no hook    |

They do not sum the loss over ranks, as the strategies of this project do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchref.models import loss_fn

from .measure import PEERS, StepMetrics, StrategySpec, TrainingSetup
from .torch_variants import TorchBatch, adamw, in_float32


def is_peer(spec: StrategySpec) -> bool:
    """Whether it is PyTorch's own."""
    return spec.name in PEERS["torchref"]


class Peer:
    """A peer's own copy of the training run; what it plans and issues is its own affair, and not known."""

    CAN_KEEP_SILENT: ClassVar[tuple[str, ...]] = ("DistributedDataParallel",)
    planned = found = schedule = None

    def __init__(
        self, setup: TrainingSetup, spec: StrategySpec, module: nn.Module, batches: Sequence[TorchBatch], *, sends: bool
    ) -> None:
        """Starts the run on this rank's rows of each batch; some peers can be kept from sending."""
        self._batches = batches
        self.buckets: list[list[tuple[str, int]]] = []
        self._replicas: DistributedDataParallel | None = None
        if spec.name == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            for layer in getattr(module, "layers", ()):
                fully_shard(layer)
            fully_shard(module)  # in place
            self._net: Any = module
        else:
            # The cheaper of its two ways to hold gradients.
            self._replicas = DistributedDataParallel(module, bucket_cap_mb=spec.bucket_mb, gradient_as_bucket_view=True)
            if not sends:
                self._replicas.register_comm_hook(None, noop_hook)
            self._net = self._replicas
            if spec.name == "torch.compile":
                import torch._inductor.config as inductor

                torch._logging.set_logs(all=logging.ERROR)
                inductor.compile_threads = 1  # in this process: workers could outlive it
                self._net = torch.compile(self._replicas)
        if spec.name == "ZeroRedundancyOptimizer":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own past when it is imported

            self._optimizer: Any = ZeroRedundancyOptimizer(
                self._net.parameters(), optimizer_class=torch.optim.AdamW, **adamw(setup)
            )
        else:
            self._optimizer = torch.optim.AdamW(self._net.parameters(), **adamw(setup))

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the whole parameters; every rank must ask."""
        module = self._replicas.module if self._replicas else self._net
        return in_float32({name: _whole(parameter.detach()) for name, parameter in module.named_parameters()})

    def step(self, index: int) -> StepMetrics:
        """Takes the step of a round; the loss is this rank's."""
        loss, norm = self.start(index)
        return StepMetrics(float(loss), float(norm))

    def start(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts the step of a round: loss and gradient norm."""
        self._optimizer.zero_grad()
        loss = loss_fn(self._net, self._batches[index])
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self._net.parameters() if p.grad is not None])
        self._optimizer.step()
        return loss.detach(), _whole(norm)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
