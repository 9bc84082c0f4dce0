"""Every variant of a setup in PyTorch: a process for each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

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
from .device_time import by_events, time_on_device, with_device_time
from .interleaving import Attempts, Variant, agree_over_ranks, interleave, time_in_a_row
from .measure import Measured, SideResult, StepMetrics, StrategySpec, TrainingSetup, largest_difference, ranks_in_words
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

    report(("doing", "training"))
    synchronize = (lambda _: torch.cuda.synchronize()) if device.type == "cuda" else (lambda _: None)
    variants = [Variant(label, one.step) for label, one in attempt.made.items()] + timed
    times, failed = interleave(
        variants,
        len(batches),
        setup.num_warmup,
        barrier=dist.barrier,
        wait=synchronize,
        agree=agree_over_ranks,
        wait_for_turn=wait_for_turn,
    )
    measured = {}
    for spec in setup.of("torchref"):
        if spec.label in times:
            one, (metrics, seconds) = attempt.made[spec.label], times[spec.label]
            if is_peer(spec):
                metrics = _over_ranks(metrics, device)
            baseline = times.get(spec.without_communication[0], ([], []))[1]
            difference = largest_difference(one.weights(), trained)
            measured[spec.label] = Measured(
                one.planned, one.issued, metrics, expected, difference, seconds, baseline, one.buckets
            )
    if setup.num_in_a_row:
        found = time_in_a_row(
            {label: attempt.made[label].start for label in measured}, setup.num_in_a_row, len(rows),
            barrier=dist.barrier, wait=synchronize, agree=agree_over_ranks, wait_for_turn=wait_for_turn,
        )  # fmt: skip
        measured = {label: replace(one, in_a_row_seconds=found.get(label, [])) for label, one in measured.items()}
    if setup.num_on_device:
        on_device, untimed = time_on_device(
            {label: attempt.made[label].start for label in measured}, setup.num_on_device, len(rows), by_events,
            barrier=dist.barrier, agree=agree_over_ranks, wait_for_turn=wait_for_turn,
        )  # fmt: skip
        measured = with_device_time(measured, on_device, untimed)
    kind, words = ranks_in_words(ranks, "torchref")
    return SideResult(
        num_ranks=num_ranks,
        kind=kind,
        ranks=words,
        backend=ranks.backend["torchref"],
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        versions={"torch": torch.__version__} | ranks.cuda_libraries(),
        weights=weights,
        trained=trained if rank == 0 else {},
        measured=measured,
        failed=attempt.failed | failed,
        probes={variant.label: times[variant.label][1] for variant in timed},
        in_turns=bool(setup.turns),
    )


def _over_ranks(metrics: list[StepMetrics], device: torch.device) -> list[StepMetrics]:
    """Metrics of a peer's step, with the mean over ranks of their local losses."""
    losses = torch.tensor([one.loss for one in metrics], dtype=torch.float64, device=device)
    dist.all_reduce(losses)
    means = (losses / dist.get_world_size()).tolist()
    return [one._replace(loss=mean) for one, mean in zip(metrics, means, strict=True)]
