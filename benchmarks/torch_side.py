"""Every variant of a setup in PyTorch: a process for each rank."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchref
from jaxddp.allocator import keep_freed_memory
from torchref import compression
from torchref.collectives import record
from torchref.interop import from_numpy, to_numpy
from torchref.launch import report
from torchref.models import build, loss_fn
from torchref.strategy import planned_collectives
from torchref.train import local_rows

from .measure import (
    BASELINE,
    Measured,
    Setup,
    SideResult,
    StepMetrics,
    StrategySpec,
    Variant,
    interleave,
    largest_difference,
)


def run(setup: Setup, weights: dict[str, np.ndarray]) -> SideResult:
    """Trains under every strategy; runs on each rank, inside a process group.

    Args:
        setup: What to train.
        weights: Initial weights, by torch name.

    Returns:
        What this rank found; times are its own.
    """
    keep_freed_memory()  # as on the JAX side: the allocator's manners are not what is compared
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    batches = [{name: torch.from_numpy(array).to(device) for name, array in batch.items()} for batch in setup.batches]
    start = from_numpy(weights, build(setup.model)).to(device)

    report(("doing", "single-process training"))
    reference = _Run(setup, copy.deepcopy(start), batches)
    expected = [reference.step(index) for index in range(len(batches))]
    trained = to_numpy(reference.module)
    del reference

    rows = [local_rows(batch, rank, num_ranks) for batch in batches]
    runs: dict[str, _Run] = {}
    for spec in setup.strategies:
        for label, wire in ((spec.label, compression.none), (spec.label + BASELINE, compression.noop)):
            if wire.sends or setup.with_baselines:
                runs[label] = _Run(setup, _strategy(setup, spec, copy.deepcopy(start), wire), rows)
    if setup.with_peer:
        # Caps as torchref's BucketedDDP has them, and the cheaper of DDP's two ways to hold gradients.
        cap = next((spec.bucket_mb for spec in setup.strategies if spec.bucket_mb), None)
        peer = DistributedDataParallel(copy.deepcopy(start), bucket_cap_mb=cap, gradient_as_bucket_view=True)
        runs["peer"] = _Run(setup, peer, rows)

    report(("doing", "training"))
    synchronize = (lambda _: torch.cuda.synchronize()) if device.type == "cuda" else (lambda _: None)
    variants = [Variant(label, one.step) for label, one in runs.items()]
    times = interleave(variants, len(batches), setup.num_warmup, barrier=dist.barrier, wait=synchronize)
    measured = {}
    for label, one in runs.items():
        if not label.endswith(BASELINE):
            metrics, seconds = times[label]
            difference = largest_difference(one.weights(), trained)
            baseline = times.get(label + BASELINE, ([], []))[1]
            measured[label] = Measured(one.planned, one.issued, metrics, expected, difference, seconds, baseline)
    on_gpu = device.type == "cuda"
    return SideResult(
        num_ranks=num_ranks,
        kind="GPUs" if on_gpu else "processes",
        ranks=f"{num_ranks} processes of {torch.get_num_threads()} thread(s), {'a GPU each' if on_gpu else 'on CPUs'}",
        backend="NCCL" if on_gpu else "Gloo",
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        versions={"torch": torch.__version__},
        weights=weights if rank == 0 else {},
        trained=trained if rank == 0 else {},
        measured=measured,
    )


def _strategy(setup: Setup, spec: StrategySpec, module: nn.Module, wire: compression.Compression) -> nn.Module:
    options: dict[str, Any] = {} if spec.bucket_mb is None else {"bucket_size_mb": spec.bucket_mb}
    if spec.name in ("zero1", "zero2"):
        options |= {"optimizer_cls": torch.optim.AdamW, **_adamw(setup)}
    return torchref.make_strategy(spec.name, module, compression=wire, **options)


def _adamw(setup: Setup) -> dict[str, Any]:
    return {"lr": setup.learning_rate, "weight_decay": 0.01}


class _Run:
    """A strategy's own copy of the training run; without a strategy, single-process training."""

    def __init__(self, setup: Setup, net: nn.Module, batches: list[dict[str, torch.Tensor]]) -> None:
        self._net = net
        self.module = net.module if isinstance(net, (torchref.DataParallel, DistributedDataParallel)) else net
        self.planned = planned_collectives(net) if isinstance(net, torchref.DataParallel) else []
        self.issued: list[tuple[str, int]] = []
        shards_its_own = isinstance(net, torchref.ZeRO1)
        optimizer: Any = net if shards_its_own else torch.optim.AdamW(self.module.parameters(), **_adamw(setup))
        self._trainer, self._batches = torchref.Trainer(loss_fn, optimizer, net), batches

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the whole parameters; every rank must ask."""
        if isinstance(self._net, torchref.FSDP):
            return {name: tensor.cpu().numpy() for name, tensor in self._net.gather_full_params().items()}
        return to_numpy(self.module)

    def step(self, index: int) -> StepMetrics:
        with record() as issued:
            metrics = self._trainer.step(self._batches[index])
        self.issued = [(one.kind, one.num_bytes) for one in issued]
        return StepMetrics(metrics["loss"], metrics["grad_norm"])
