"""Traces of steps in PyTorch: recorded by its profiler, and read by the ranges around the parts of a step.

The loop is that of ``torchref``, written out with a range around each part. An operation belongs to the range in which
it starts. Gloo communicates on its own threads, with names known to the profiler.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import torchref
from torchref.agreement import group_device
from torchref.launch import report
from torchref.models import build, cross_entropy
from torchref.strategy import planned_collectives
from torchref.train import local_rows

from ..harness.intervals import Event
from ..harness.ranks import Ranks
from ..training.measure import TrainingSetup
from ..training.torch_variants import TorchBatch, adamw
from .overlap import COMMUNICATION, COMPUTE, SYNC

STEP = "step"
RANGES = ("forward", "loss", "backward", SYNC, "optimizer")
NUM_STEPS = 3  # the second one is read


def run(ranks: Ranks, setup: TrainingSetup, names: tuple[str, ...], folder: str) -> dict[str, tuple[list[Event], int]]:
    """Records steps; runs on each rank, inside a process group.

    Returns, by strategy, this rank's events of a step, and the number of planned collectives.
    """
    del ranks
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints when it starts and stops
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = group_device()
    rows = [
        local_rows({name: torch.from_numpy(array).to(device) for name, array in batch.items()}, rank, num_ranks)
        for batch in setup.batches
    ]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    found = {}
    for name in names:
        report(("doing", f"tracing {name}"))
        net = torchref.make_strategy(name, build(setup.model, seed=setup.seed).to(device))
        optimizer = torch.optim.AdamW(net.module.parameters(), **adamw(setup))
        _step(net, optimizer, rows[0])  # a warm-up
        dist.barrier()
        with profile(activities=activities) as profiler:
            for index in range(NUM_STEPS):
                with record_function(STEP):
                    _step(net, optimizer, rows[(1 + index) % len(rows)])
                    if device.type == "cuda":
                        torch.cuda.synchronize()
        if rank == 0:
            profiler.export_chrome_trace(str(Path(folder) / f"torchref-{name}.json.gz"))
        found[name] = (read(profiler.events()), len(planned_collectives(net)))
    return found


def _step(net: Any, optimizer: torch.optim.Optimizer, batch: TorchBatch) -> None:
    net.on_train_batch_start()
    net.zero_grad(set_to_none=True)
    with record_function("forward"):
        logits = net(batch["tokens"])
    with record_function("loss"):
        loss = cross_entropy(logits, batch["targets"])
    with record_function("backward"):
        loss.backward()
    with record_function(SYNC):
        net.finish_gradient_synchronization()
    with record_function("optimizer"):
        optimizer.step()


def read(recorded: Sequence[Any]) -> list[Event]:
    """Reads the second of the traced steps: its events by start, timed from the start of the step.

    ``recorded`` are the profiler's events: a name, a ``time_range`` in us, a ``device_type`` and a ``cpu_parent``.

    Raises:
        ValueError: If there is no such step.
    """
    on_host = [event for event in recorded if event.device_type == DeviceType.CPU]
    steps = sorted((event.time_range.start, event.time_range.end) for event in on_host if event.name == STEP)
    if len(steps) < NUM_STEPS:
        raise ValueError(f"trace must hold {NUM_STEPS} steps, it has {len(steps)}")
    begin, end = steps[1]
    ranges = {
        event.name: event.time_range
        for event in on_host
        if event.name in RANGES and begin <= event.time_range.start < end
    }
    events = []
    for event in recorded:
        start_us, end_us = event.time_range.start, event.time_range.end
        if begin <= start_us < end and (lane := _lane(event)):
            phase = SYNC if lane == COMMUNICATION else _phase(event, ranges)
            events.append(Event(lane, event.name, phase, (start_us - begin) / 1e3, (end_us - begin) / 1e3))
    return sorted(events, key=lambda one: one.start_ms)


def _lane(event: Any) -> str | None:
    """The lane of an event; None if it only encloses others, issues or waits."""
    if event.device_type != DeviceType.CPU:
        if getattr(event, "is_user_annotation", False):  # the GPU's copy of a range
            return None
        return COMMUNICATION if event.name.startswith("nccl") else COMPUTE
    if event.name.startswith("gloo:"):
        return COMMUNICATION
    inside = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
    return COMPUTE if event.name.startswith("aten::") and not inside else None


def _phase(event: Any, ranges: dict[str, Any]) -> str:
    if event.device_type != DeviceType.CPU:
        return "compute"  # a kernel runs after the range that launched it
    for name, of_range in ranges.items():
        if of_range.start <= event.time_range.start < of_range.end:
            return "backward" if name == SYNC else name  # packing and division
    return "compute"
