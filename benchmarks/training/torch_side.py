"""Every variant of a setup in PyTorch: a process for each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from torchref.agreement import group_device
from torchref.communication import compression
from torchref.interop import from_numpy
from torchref.launch import report
from torchref.models import build
from torchref.train import local_rows

from ..harness.ranks import Ranks
from ..harness.turns import join
from .arithmetic import set_in_torch
from .device_time import by_events
from .interleaving import Attempts, agree_over_ranks
from .measure import SideResult, StepMetrics, StrategySpec, TrainingSetup
from .rounds import time_rounds
from .torch_peers import Peer, is_peer
from .torch_variants import Planned, probes, wrap


def run(ranks: Ranks, setup: TrainingSetup, initial: str) -> SideResult:
    """Trains under every strategy, from the weights of a file of rank 0; runs on each rank, inside a process group."""
    with join(setup.turns, "torchref", lambda: report(("waits",))) as wait_for_turn:
        return _train(ranks, setup, initial, wait_for_turn)


def _train(ranks: Ranks, setup: TrainingSetup, initial: str, wait_for_turn: Callable[[], None]) -> SideResult:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = group_device()
    batches = [{name: torch.from_numpy(array).to(device) for name, array in batch.items()} for batch in setup.batches]
    weights = dict(np.load(initial)) if rank == 0 else {}
    start = build(setup.model)
    start = (from_numpy(weights, start) if rank == 0 else start).to(device)
    start = set_in_torch(setup.dtype, start)
    for tensor in start.state_dict().values():
        dist.broadcast(tensor, 0)

    report(("doing", "single-process training"))
    reference = Planned(setup, copy.deepcopy(start), batches)
    expected = [reference.step(index) for index in range(len(batches))]
    trained = reference.weights()
    del reference

    rows = [local_rows(batch, rank, num_ranks) for batch in batches]
    attempt = Attempts(agree_over_ranks)

    def add(label: str, spec: StrategySpec, wire: compression.Compression) -> None:
        def make() -> Planned | Peer:
            module = copy.deepcopy(start)
            if is_peer(spec):
                return Peer(setup, spec, module, rows, sends=wire.sends)
            return Planned(setup, wrap(setup, spec, module, wire), rows)

        attempt(label, make)

    for spec in setup.of("torchref"):
        add(spec.label, spec, compression.none)
        if setup.with_baselines and (not is_peer(spec) or spec.name in Peer.CAN_KEEP_SILENT):
            add(*spec.without_communication, compression.noop)
    timed = probes(setup, copy.deepcopy(start), rows) if setup.probe_bytes else []

    on_gpu = device.type == "cuda"
    side = time_rounds(
        "torchref", ranks, setup, attempt, timed, expected, trained,
        time_step=by_events,
        wait_for_turn=wait_for_turn,
        wait=(lambda _: torch.cuda.synchronize()) if on_gpu else (lambda _: None),
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        versions={"torch": torch.__version__} | ranks.cuda_libraries(),
        weights=weights,
    )  # fmt: skip
    for spec in filter(is_peer, setup.of("torchref")):
        if (one := side.measured.get(spec.label)) is not None:
            one.metrics = _over_ranks(one.metrics, device)
    return side


def _over_ranks(metrics: list[StepMetrics], device: torch.device) -> list[StepMetrics]:
    """Metrics of a peer's step, with the mean over ranks of their local losses."""
    losses = torch.tensor([one.loss for one in metrics], dtype=torch.float64, device=device)
    dist.all_reduce(losses)
    means = (losses / dist.get_world_size()).tolist()
    return [one._replace(loss=mean) for one, mean in zip(metrics, means, strict=True)]
