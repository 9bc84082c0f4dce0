"""A training run in PyTorch: each strategy's own copy, those of torch's own data parallelism, and probes.

| peer                      | what it is                                                  | without communication      |
|---------------------------|-------------------------------------------------------------|----------------------------|
| `DistributedDataParallel` | all-reduces of buckets                                      | a hook that sends nothing  |
| `torch.compile`           | the same, compiled: its graph is cut where buckets end      | not run: compiled twice    |
| `ZeroRedundancyOptimizer` | the same, and an optimizer whose state is sharded by tensor | not run: it has no hook    |
| `fully_shard`             | FSDP2: a layer is a unit, the rest is another               | not run: it has no hook    |

Peers do not sum the loss over ranks, as the strategies of this project do.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchref
from torchref.communication.collectives import record, silent
from torchref.interop import from_numpy
from torchref.models import build, loss_fn
from torchref.registry import make_training
from torchref.train import local_rows

from ..ranks import Ranks
from ..timing import Attempts
from .setup import NUM_PROBED, PEERS, SILENT, Metrics, Probes, StrategySpec, TrainingSetup

TorchBatch = dict[str, torch.Tensor]


class TorchSide:
    """Torch's variants on this rank, from the same weights and batches."""

    def __init__(self, ranks: Ranks, setup: TrainingSetup) -> None:
        self.setup, self.on_gpu = setup, ranks.kind == "gpus"
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        self.device = torch.cuda.get_device_name() if self.on_gpu else "cpu"
        self.versions = {"torch": torch.__version__}
        torch.set_float32_matmul_precision("high" if setup.dtype == "tf32" else "highest")
        start = from_numpy(initial_weights(setup), build(setup.model)).to(device)
        self.module = start.to(torch.bfloat16) if setup.dtype == "bf16" else start
        self.batches = [{name: torch.from_numpy(one).to(device) for name, one in b.items()} for b in setup.batches]
        self.rows = [local_rows(batch, dist.get_rank(), ranks.num) for batch in self.batches]
        # One kernel for all parameters, as XLA makes of optax's.
        self.adamw: dict[str, Any] = {"lr": setup.learning_rate, "weight_decay": 0.01, "fused": True}

    def make(self, attempt: Attempts, baselines: Sequence[StrategySpec]) -> dict[str, Any]:
        """Makes a run of each strategy; those of ``baselines`` also without communication."""
        runs: dict[str, Any] = {}
        for spec in self.setup.strategies["torchref"]:
            for sends in (True, False) if spec in baselines else (True,):
                label = f"torchref {spec.label}{'' if sends else SILENT}"
                if (run := attempt(label, partial(self._new, spec, sends))) is not None:
                    runs[label] = run
        return runs

    def _new(self, spec: StrategySpec, sends: bool) -> TorchRun | PeerRun:
        module = copy.deepcopy(self.module)
        if spec.name in PEERS["torchref"]:
            return PeerRun(self, spec, module, sends=sends)
        net, optimizer = make_training(spec.name, module, torch.optim.AdamW, spec.options, **self.adamw)
        return TorchRun(self, net, optimizer, self.rows, sends=sends)

    def reference(self) -> tuple[Metrics, dict[str, np.ndarray]]:
        """Trains on this rank alone: the metrics of every round, and the weights after the last."""
        module = copy.deepcopy(self.module)
        run = TorchRun(self, module, torch.optim.AdamW(module.parameters(), **self.adamw), self.batches)
        return [run.step(index) for index in range(len(self.batches))], run.weights()

    def probes(self) -> Probes:
        """Forward and backward alone, all-reduces alone, and both at once."""
        module = copy.deepcopy(self.module)

        def forward_backward(index: int) -> None:
            module.zero_grad(set_to_none=True)
            loss_fn(module, self.rows[index]).backward()
            self.wait()

        def buffers_of(num_bytes: int) -> list[torch.Tensor]:
            return [torch.zeros(num_bytes // 4, device=next(module.parameters()).device) for _ in range(NUM_PROBED)]

        def all_reduce(buffers: list[torch.Tensor], index: int) -> None:
            for buffer in buffers:
                dist.all_reduce(buffer)
            self.wait()

        def both(buffers: list[torch.Tensor], index: int) -> None:
            under_way = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
            forward_backward(index)
            for work in under_way:
                work.wait()
            self.wait()

        return Probes(buffers_of, forward_backward, all_reduce, both)

    def wait(self) -> None:
        """Waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


class TorchRun:
    """A strategy's own copy of the training run, as `JaxRun`; without a strategy, single-process training.

    ``found`` are the collectives that its first step issued.
    """

    found: list[tuple[str, int]] | None = None

    def __init__(
        self, side: TorchSide, net: nn.Module, optimizer: Any, batches: Sequence[TorchBatch], *, sends: bool = True
    ) -> None:
        self._side, self._batches, self._sends = side, batches, sends
        self._trainer, self._net = torchref.Trainer(loss_fn, optimizer, net), net
        self._parallel = net if isinstance(net, torchref.DataParallel) else None
        self.planned = self._parallel.planned_collectives() if self._parallel else []
        buckets = self._parallel.plan.buckets if self._parallel else ()
        self.buckets = [[(tensor.name, tensor.num_bytes) for tensor in bucket.tensors] for bucket in buckets]

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the whole parameters, in float32; every rank must ask."""
        return _in_float32(self._parallel.gather_full_params() if self._parallel else self._net.state_dict())

    def step(self, index: int) -> tuple[float, float]:
        """Takes the step of a round: loss and gradient norm, once all of it is done."""
        with record() as issued, contextlib.nullcontext() if self._sends else silent():
            metrics = self._trainer.step(self._batches[index])
        self._side.wait()
        self.found = self.found or [(one.kind, one.num_bytes) for one in issued]
        return float(metrics["loss"]), float(metrics["grad_norm"])


class PeerRun:
    """A peer's own copy of the training run; what it plans and issues is its own affair."""

    planned = found = None
    buckets = ()

    def __init__(self, side: TorchSide, spec: StrategySpec, module: nn.Module, *, sends: bool) -> None:
        """Starts the run on this rank's rows, in the loop that torch's documentation shows."""
        self._side, self._module = side, module
        self._net: Any = module
        if spec.name == "fully_shard":
            for layer in getattr(module, "layers", ()):
                fully_shard(layer)
            fully_shard(module)  # in place
        else:
            # The cheaper of its two ways to hold gradients.
            self._net = DistributedDataParallel(module, bucket_cap_mb=spec.bucket_mb, gradient_as_bucket_view=True)
            if not sends:
                self._net.register_comm_hook(None, noop_hook)
        if spec.name == "torch.compile":
            import torch._inductor.config as inductor

            torch._logging.set_logs(all=logging.ERROR)
            inductor.compile_threads = 1  # in this process: workers could outlive it
            self._net = torch.compile(self._net)
        parameters = self._net.parameters()
        if spec.name == "ZeroRedundancyOptimizer":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own past when it is imported

            self._optimizer: Any = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **side.adamw)
        else:
            self._optimizer = torch.optim.AdamW(parameters, **side.adamw)

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the whole parameters; every rank must ask."""
        return _in_float32({name: _whole(parameter.detach()) for name, parameter in self._module.named_parameters()})

    def step(self, index: int) -> tuple[float, float]:
        """Takes the step of a round; the loss is this rank's."""
        self._optimizer.zero_grad()
        loss = loss_fn(self._net, self._side.rows[index])
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self._net.parameters() if p.grad is not None])
        self._optimizer.step()
        self._side.wait()
        return float(loss.detach()), float(_whole(norm))


def initial_weights(setup: TrainingSetup) -> dict[str, np.ndarray]:
    """The weights from which every run of a setup starts: JAX's, by torch's names."""
    import jax

    from jaxddp.checkpoint.interop import to_numpy
    from jaxddp.models import build as build_in_jax

    if "jaxddp" not in setup.frameworks:  # this process has no use of JAX otherwise
        jax.config.update("jax_platforms", "cpu")
    return to_numpy(build_in_jax(setup.model)[1])


def _in_float32(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies tensors to NumPy, which has no bfloat16."""
    copies = {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}
    return {name: tensor.contiguous().numpy() for name, tensor in copies.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
