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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchref
from torchref.communication.collectives import record, silent
from torchref.interop import from_numpy
from torchref.models import build, loss_fn
from torchref.registry import make_training
from torchref.train import local_rows

from ..ranks import Ranks, gather
from ..timing import Attempts
from .setup import (
    AT_ONCE,
    FORWARD_BACKWARD,
    NUM_PROBED,
    PEERS,
    SILENT,
    StrategySpec,
    TrainingSetup,
    all_reduce_label,
)

FRAMEWORK = "torchref"
TorchBatch = dict[str, torch.Tensor]


class TorchSide:
    """Torch's variants on this rank; runs are made by ``make``."""

    def __init__(self, ranks: Ranks, setup: TrainingSetup, weights: Mapping[str, np.ndarray] | None) -> None:
        """Makes the weights, JAX's if it has none yet, and the batches that all share."""
        self.setup, self._ranks = setup, ranks
        self.on_gpu = ranks.kind == "gpus"
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        self.device = torch.cuda.get_device_name() if self.on_gpu else "cpu"
        self.versions = {"torch": torch.__version__}
        torch.set_float32_matmul_precision("high" if setup.dtype == "tf32" else "highest")
        start = from_numpy(dict(weights or initial_weights(setup)), build(setup.model)).to(device)
        self.module = start.to(torch.bfloat16) if setup.dtype == "bf16" else start
        self.batches = [{name: torch.from_numpy(one).to(device) for name, one in b.items()} for b in setup.batches]
        self.rows = [local_rows(batch, dist.get_rank(), ranks.num) for batch in self.batches]

    def make(self, attempt: Attempts, baselines: Sequence[StrategySpec]) -> dict[str, Any]:
        """Makes a run of each strategy; those of ``baselines`` also without communication."""
        runs: dict[str, Any] = {}
        for spec in self.setup.strategies[FRAMEWORK]:
            for sends in (True, False) if spec in baselines else (True,):
                label = f"{FRAMEWORK} {spec.label}{'' if sends else SILENT}"
                if (run := attempt(label, partial(self._new, spec, sends))) is not None:
                    runs[label] = run
        return runs

    def _new(self, spec: StrategySpec, sends: bool) -> TorchRun | PeerRun:
        module = copy.deepcopy(self.module)
        if spec.name in PEERS[FRAMEWORK]:
            return PeerRun(self, spec, module, sends=sends)
        options: dict[str, Any] = {} if spec.bucket_mb is None else {"bucket_mb": spec.bucket_mb}
        net, optimizer = make_training(spec.name, module, torch.optim.AdamW, options, **adamw(self.setup))
        return TorchRun(self, net, optimizer, self.rows, sends=sends)

    def reference(self) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
        """Trains on this rank alone: the metrics of every round, and the weights after the last."""
        module = copy.deepcopy(self.module)
        run = TorchRun(self, module, torch.optim.AdamW(module.parameters(), **adamw(self.setup)), self.batches)
        return [run.step(index) for index in range(len(self.batches))], run.weights()

    def probes(self) -> dict[str, Callable[[int], None]]:
        """Forward and backward alone, all-reduces alone, and both at once."""
        module = copy.deepcopy(self.module)
        device = next(module.parameters()).device

        def forward_backward(index: int) -> None:
            module.zero_grad(set_to_none=True)
            loss_fn(module, self.rows[index]).backward()
            self.wait()

        def buffers_of(num_bytes: int) -> list[torch.Tensor]:
            return [torch.zeros(num_bytes // 4, device=device) for _ in range(NUM_PROBED)]

        def all_reduce(index: int, buffers: list[torch.Tensor]) -> None:
            for buffer in buffers:
                dist.all_reduce(buffer)
            self.wait()

        def at_once(index: int, buffers: list[torch.Tensor]) -> None:
            under_way = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
            forward_backward(index)
            for work in under_way:
                work.wait()
            self.wait()

        found: dict[str, Callable[[int], None]] = {FORWARD_BACKWARD: forward_backward}
        found[AT_ONCE] = partial(at_once, buffers=buffers_of(self.setup.probe_bytes[-2]))
        for num_bytes in self.setup.probe_bytes:
            found[all_reduce_label(num_bytes)] = partial(all_reduce, buffers=buffers_of(num_bytes))
        return {f"{FRAMEWORK} {label}": probe for label, probe in found.items()}

    def wait(self) -> None:
        """Waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


class TorchRun:
    """A strategy's own copy of the training run, as `JaxRun`; without a strategy, single-process training.

    ``found`` are the collectives that its first step issued.
    """

    found: list[tuple[str, int]] | None = None
    program = None

    def __init__(
        self, side: TorchSide, net: nn.Module, optimizer: Any, batches: Sequence[TorchBatch], *, sends: bool = True
    ) -> None:
        """Starts the run of a module, or of a strategy around it."""
        self._side, self._net, self._batches, self._sends = side, net, batches, sends
        parallel = net if isinstance(net, torchref.DataParallel) else None
        self.planned = parallel.planned_collectives() if parallel else []
        self.buckets = [
            [(tensor.name, tensor.num_bytes) for tensor in bucket.tensors]
            for bucket in (parallel.plan.buckets if parallel else ())
        ]
        self._parallel = parallel
        self._module = parallel.module if parallel else net
        self._trainer = torchref.Trainer(loss_fn, optimizer, net)

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the whole parameters, in float32; every rank must ask."""
        return in_float32(self._parallel.gather_full_params() if self._parallel else self._module.state_dict())

    def start(self, index: int) -> Any:
        """Takes the step of a round, but for what the GPU has left to do; its metrics."""
        with record() as issued, contextlib.nullcontext() if self._sends else silent():
            metrics = self._trainer.step(self._batches[index])
        self.found = self.found or [(one.kind, one.num_bytes) for one in issued]
        return metrics

    def step(self, index: int) -> tuple[float, float]:
        """Takes the step of a round: loss and gradient norm, once all of it is done."""
        metrics = self.start(index)
        self._side.wait()
        return float(metrics["loss"]), float(metrics["grad_norm"])


class PeerRun:
    """A peer's own copy of the training run; what it plans and issues is its own affair."""

    planned = found = program = None

    def __init__(self, side: TorchSide, spec: StrategySpec, module: nn.Module, *, sends: bool) -> None:
        """Starts the run on this rank's rows, in the loop that torch's documentation shows."""
        self._side = side
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
        options = adamw(side.setup)
        if spec.name == "ZeroRedundancyOptimizer":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own past when it is imported

            self._optimizer: Any = ZeroRedundancyOptimizer(
                self._net.parameters(), optimizer_class=torch.optim.AdamW, **options
            )
        else:
            self._optimizer = torch.optim.AdamW(self._net.parameters(), **options)

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the whole parameters; every rank must ask."""
        module = self._replicas.module if self._replicas else self._net
        return in_float32({name: _whole(parameter.detach()) for name, parameter in module.named_parameters()})

    def start(self, index: int) -> Any:
        """Starts the step of a round; the loss is this rank's."""
        self._optimizer.zero_grad()
        loss = loss_fn(self._net, self._side.rows[index])
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self._net.parameters() if p.grad is not None])
        self._optimizer.step()
        return loss.detach(), _whole(norm)

    def step(self, index: int) -> tuple[float, float]:
        """Takes the step of a round; the loss is this rank's."""
        loss, norm = self.start(index)
        self._side.wait()
        return float(loss), float(norm)

    def over_ranks(self, metrics: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Metrics with the mean of the ranks' losses."""
        means = np.mean(gather([loss for loss, _ in metrics]), axis=0).tolist()
        return [(mean, norm) for mean, (_, norm) in zip(means, metrics, strict=True)]


def initial_weights(setup: TrainingSetup) -> dict[str, np.ndarray]:
    """The weights from which every run of a setup starts, by torch's names, in a process that has no use of JAX."""
    import jax

    from jaxddp.checkpoint.interop import to_numpy
    from jaxddp.models import build as build_in_jax

    jax.config.update("jax_platforms", "cpu")
    return to_numpy(build_in_jax(setup.model, seed=setup.seed)[1])


def adamw(setup: TrainingSetup) -> dict[str, Any]:
    """Arguments of torch's AdamW: one kernel for all parameters, as XLA makes of optax's."""
    return {"lr": setup.learning_rate, "weight_decay": 0.01, "fused": True}


def in_float32(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies tensors to NumPy, which has no bfloat16."""
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
        for name, tensor in tensors.items()
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
