"""The time of a step on its GPU, from its first operation there to its last, without what the host does around it.

torch has two CUDA events on the stream that waits for NCCL's; JAX has its profiler, a trace for each step, of which all
streams of a GPU count. Each framework is timed in processes of its own, after all other rows are written: stopping
JAX's profiler may crash the process (jax#40260). CPUs have no such time: there the host computes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist

from jaxddp.instruments.trace import read_trace
from jaxddp.training.clock import summarize

from ..benchmark import NOT_RUN, Say
from ..ranks import Ranks, agree, gather, say_on_rank
from ..render import CHECK, STEP, Column
from ..timing import Attempts
from .rank import _side
from .setup import TrainingSetup

NUM_STEPS = 5  # after a warm-up
DEVICE = "The same steps on the GPU"
DEVICE_COLUMNS = (Column("strategy", "label"), Column("framework"), *STEP, CHECK)


def measure_on_device(setup: TrainingSetup, frameworks: tuple[str, ...], say: Say) -> Iterator[dict[str, Any]]:
    """Rows of a framework."""
    yield from setup.ranks.run(time_on_device, setup.of(frameworks), in_jax="jaxddp" in frameworks, say=say)


def time_on_device(ranks: Ranks, setup: TrainingSetup) -> list[dict[str, Any]]:
    """Times steps of each variant by turns; runs on each rank."""
    (framework,) = setup.frameworks
    attempt, side = Attempts(agree), _side(framework, ranks, setup, None)
    runs = side.make(attempt, [])
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    for index in range(1 + NUM_STEPS):
        for label, run in runs.items():
            if label not in attempt.failed:
                dist.barrier()
                start = partial(run.start, index % len(setup.batches))
                timed = partial(by_profiler if framework == "jaxddp" else by_events, start)
                found = attempt(label, timed)
                seconds[label] += [] if found is None or not index else [found]
        say_on_rank()
    rows = []
    for spec in setup.strategies[framework]:
        label = f"{framework} {spec.label}"
        row = {"table": DEVICE, "framework": framework, "strategy": spec.name, "label": spec.label}
        if label in attempt.failed:
            rows.append(row | {"check": f"{NOT_RUN}{attempt.failed[label]}"})
        else:
            slowest = [max(times) for times in zip(*gather(seconds[label]), strict=True)]
            rows.append(row | summarize(slowest)._asdict() | {"device": side.device, "check": "ok"})
    return rows


def by_events(start: Callable[[], Any]) -> float:
    """Seconds of a step of torch on this rank's GPU."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    start()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def by_profiler(start: Callable[[], Any], device: str = "/device:GPU:") -> float:
    """Seconds of a step of JAX on this rank's GPU; ``device`` is how the names of devices that count begin.

    Raises:
        RuntimeError: If the profiler does not start; the step is taken nevertheless, since other ranks take it.
        ValueError: If it has recorded nothing on a device.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="device-time-") as folder:
        fault: Exception | None = None
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except Exception as error:
            fault = error
        try:
            dist.barrier()  # the profiler takes longer to start on some ranks than on others
            jax.block_until_ready(start())
        finally:
            if fault is None:
                jax.profiler.stop_trace()
        if fault is not None:
            raise RuntimeError(f"the profiler does not start: {fault}") from fault
        spans = [
            one.span_us for name, one in read_trace(folder).overlaps().items() if name.startswith(device)
        ]  # fmt: skip
        if not spans:
            raise ValueError("the profiler has recorded nothing on a device")
        return max(spans) / 1e6
