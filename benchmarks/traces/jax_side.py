"""Traces of steps in JAX: recorded by its profiler, and read by the names of the compiled program.

A step is one program, so Python cannot annotate its parts. The profiler records the program's operations, and
``jaxddp.read_schedule`` gives the phase of each. A scope around the model's units separates forward and loss.

On CPUs XLA hands some matrix products to other threads, and the profiler records only the hand-over. The next operation
waits for them, so a product is taken to last until that begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import torch.distributed as dist

import jaxddp
from jaxddp.instruments.schedule import Operation, Schedule
from jaxddp.mesh import platform_of
from jaxddp.models import build
from jaxddp.zero.layers import layer
from torchref.launch import report

from ..harness.intervals import Event
from ..harness.jax_profile import read_trace
from ..harness.ranks import Ranks
from ..training.jax_variants import rows_of_process
from ..training.measure import TrainingSetup
from .overlap import COMMUNICATION, COMPUTE, SYNC

MODEL_SCOPE = "model"
NUM_STEPS = 3  # the second one is read


def run(ranks: Ranks, setup: TrainingSetup, names: tuple[str, ...], folder: str) -> dict[str, tuple[list[Event], int]]:
    """Records steps of strategies.

    Returns:
        By strategy, the events of this process's first rank in a step, and the number of planned collectives.
    """
    mesh = ranks.mesh()
    rows = [rows_of_process(batch) for batch in setup.batches]
    loss_fn, params = build(setup.model, seed=setup.seed, layer=lambda unit: layer(jax.named_scope(MODEL_SCOPE)(unit)))
    found = {}
    for name in names:
        report(("doing", f"tracing {name}"))
        optimizer = optax.adamw(setup.learning_rate, weight_decay=0.01)
        trainer = jaxddp.Trainer(loss_fn, optimizer, jaxddp.make_strategy(name), mesh)
        state = trainer.init(params)
        schedule = jaxddp.read_schedule(trainer.compile(state, setup.batches[0]))
        where, is_first = Path(folder) / f"jaxddp-{name}", dist.get_rank() == 0
        for index in range(NUM_STEPS + 1):
            if index == 1 and is_first:  # the first step is a warm-up
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0
                jax.profiler.start_trace(where, profiler_options=options)
            with jax.profiler.StepTraceAnnotation("train", step_num=index):
                state, _ = trainer.step(state, rows[index % len(rows)])
        if is_first:
            jax.profiler.stop_trace()
            events = read(where, schedule, waits_late=platform_of(mesh) == "cpu")
            found[name] = (events, len(schedule.collectives()))
    return found


def read(folder: Path, schedule: Schedule, *, waits_late: bool) -> list[Event]:
    """Reads the second traced step of a process's first device.

    ``waits_late`` tells whether a matrix product lasts until the next operation begins.

    Raises:
        ValueError: If there is no such step.
    """
    operations = {operation.name: operation for operation in _all(schedule.operations)}
    runs: dict[Any, list[tuple[Operation, float, float]]] = {}
    for path in sorted(folder.rglob("*.xplane.pb")):
        for device, run_id, name, start_ns, end_ns in _events(path):
            if name in operations:
                runs.setdefault((device, run_id), []).append((operations[name], start_ns, end_ns))
    first = min((device for device, _ in runs), default=None)
    of_first = [sorted(ran, key=lambda one: one[1]) for (device, _), ran in runs.items() if device == first]
    if len(of_first) == 1:
        of_first = _split(of_first[0])
    steps = sorted(of_first, key=lambda ran: ran[0][1])
    if len(steps) < NUM_STEPS:
        raise ValueError(f"trace (={folder}) must hold {NUM_STEPS} steps, it has {len(steps)}")
    step = steps[1]
    begin = step[0][1]
    following = [start for _, start, _ in step[1:]] + [step[-1][2]]
    events = []
    for (operation, start, end), after in zip(step, following, strict=True):
        until = max(end, after) if waits_late and operation.work.matmul_flops else end
        events.append(_event(operation, (start - begin) / 1e6, (until - begin) / 1e6))
    return events


def _split(ran: list[tuple[Operation, float, float]]) -> list[list[tuple[Operation, float, float]]]:
    """Splits a device's operations where its first one recurs: GPUs do not number their runs."""
    starts = [index for index, (operation, _, _) in enumerate(ran) if operation.name == ran[0][0].name]
    return [ran[start:end] for start, end in zip(starts, [*starts[1:], len(ran)], strict=True)]


def _events(path: Path) -> Iterator[tuple[Any, Any, str, float, float]]:
    """Device, number of the run, name, start and end of each operation of a compiled program."""
    for plane, _, event in read_trace(path):
        said = dict(event.stats)
        if "hlo_op" in said:
            device = said.get("device_ordinal", plane)
            yield device, said.get("run_id"), said["hlo_op"], event.start_ns, event.start_ns + event.duration_ns


def _event(operation: Operation, start_ms: float, end_ms: float) -> Event:
    if operation.starts is None:
        return Event(COMPUTE, operation.name, _phase(operation), start_ms, end_ms)
    return Event(COMMUNICATION, operation.name, "metrics" if operation.starts.is_metrics else SYNC, start_ms, end_ms)


def _phase(operation: Operation) -> str:
    in_loss = "jvp(" in operation.op_name and f"{MODEL_SCOPE})" not in operation.op_name
    return "loss" if operation.phase == "forward" and in_loss else operation.phase


def _all(operations: tuple[Operation, ...]) -> Iterator[Operation]:
    for operation in operations:
        yield operation
        yield from _all(operation.body)
