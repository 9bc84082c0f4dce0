"""Scaling beyond this machine: steps compiled for targets, read back and simulated with published peak rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

import jaxddp
from jaxddp import targets
from jaxddp.instruments.inspect import transformer_training
from jaxddp.instruments.simulate import network_of, simulate
from jaxddp.instruments.targets import TargetError, check_installed
from jaxddp.models import SIZES

from ..harness.console import progress_of
from ..harness.options import Options
from ..harness.run import NotRun
from ..strategies.benchmark import QUICK_MODEL
from ..training.measure import StrategySpec

MODEL = "seed_xl"
TARGET, QUICK_TARGET = "h100:512", "h100:64"
FIRST, GROWTH, QUICK_GROWTH = 8, 4, 8
MODES = ("strong", "weak")
WEAK_BATCH = 16  # sequences per device
STRONG_LEAST = 2  # sequences per device at the largest target


@dataclass(frozen=True)
class Beyond:
    """What is simulated: jaxddp's strategies on targets with growing numbers of devices."""

    model: str
    specs: tuple[StrategySpec, ...]
    targets: tuple[targets.Target, ...]

    @property
    def in_words(self) -> str:
        """A short description."""
        return f"{self.model} on {', '.join(str(one.num_devices) for one in self.targets)} {self.targets[0].chip.name}"

    def batch_size(self, mode: str, num_devices: int) -> int:
        """Sequences of the global batch."""
        return WEAK_BATCH * num_devices if mode == "weak" else STRONG_LEAST * self.targets[-1].num_devices


def beyond_of(options: Options, specs: Sequence[StrategySpec]) -> Beyond:
    """Decides what to simulate: targets of one chip, from 8 devices on; raises ValueError if there are none."""
    largest = targets.target(options.target or (QUICK_TARGET if options.quick else TARGET))
    counts, count = [], FIRST
    while count < largest.num_devices:
        counts.append(count)
        count *= QUICK_GROWTH if options.quick else GROWTH
    smaller = [targets.target(f"{largest.chip.name}:{count}") for count in counts]
    # The default caps: those of measured runs are for models small enough for this machine.
    plain = tuple(StrategySpec(spec.name, spec.bucket_mb and 25.0) for spec in specs)
    return Beyond(QUICK_MODEL if options.quick else MODEL, plain, (*smaller, largest))


def simulate_beyond(beyond: Beyond, console: Console) -> Iterator[dict[str, Any]]:
    """Compiles and simulates; raises NotRun if the target's compiler is not installed."""
    try:
        check_installed(beyond.targets[0])
    except TargetError as error:
        raise NotRun(str(error)) from None
    points = [(spec, mode, one) for spec in beyond.specs for mode in MODES for one in beyond.targets]
    with progress_of(console, "simulation") as show:
        show(0, ("doing", f"compiling {len(points)} programs, {beyond.in_words}"))
        pending = [_start(beyond, *point) for point in points]
        for index, (point, started) in enumerate(zip(points, pending, strict=True)):
            yield _row(beyond, *point, *started)
            show(0, ("progress", index + 1, len(points)))


def _start(beyond: Beyond, spec: StrategySpec, mode: str, target: targets.Target) -> tuple[Any, list[tuple[str, int]]]:
    """Starts a compilation; returns it with the planned collectives."""
    training = transformer_training(SIZES[beyond.model], beyond.batch_size(mode, target.num_devices))
    options = {} if spec.bucket_mb is None else {"bucket_mb": spec.bucket_mb}
    strategy, mesh = jaxddp.make_strategy(spec.name, **options), targets.mesh(target.spec)
    trainer = jaxddp.Trainer(training.loss_fn, training.optimizer, strategy, mesh)
    state, batch = trainer.abstract_state(training.params), training.batch
    return targets.start_compile(trainer, state, batch), trainer.planned(state, batch)


def _row(
    beyond: Beyond, spec: StrategySpec, mode: str, target: targets.Target, pending: Any, planned: list[tuple[str, int]]
) -> dict[str, Any]:
    chip, size = target.chip, beyond.batch_size(mode, target.num_devices)
    row = {
        "framework": "jaxddp",
        "backend": "simulated",
        "device": chip.name,
        "kind": chip.name,
        "num_ranks": target.num_devices,
        "model": beyond.model,
        "strategy": spec.name,
        "bucket_mb": spec.bucket_mb,
        "global_batch": size,
        "microbatch": size // target.num_devices,
        "mode": mode,
        "how": "simulated",
    }
    network, schedule = network_of(target), jaxddp.read_schedule(pending.result())
    found, compiled = simulate(schedule, chip, network), schedule.gradient_collectives()
    return row | {
        "planned": planned,
        "compiled": compiled,
        "median_ms": found.step_s * 1e3,
        "exposed_ms": found.exposed_s * 1e3,
        "network": f"simulated: {chip.description}, {chip.link_gb_per_s:g} GB/s per device in a host,"
        f" {chip.host_link_gb_per_s:g} between hosts, {network.latency_us:g} us per all-reduce",
        "check": "ok" if compiled == sorted(planned) else f"WRONG: {len(planned)} collectives planned, others found",
    }
