"""One compilation for a machine that is not here, timed part by part.

    part      what is timed                                                           where
    --------  ----------------------------------------------------------------------  -------------
    trace     the backward traced, and its gradients ordered by when they are ready   this process
    plan      the bucket plan alone                                                   this process
    export    the step traced, lowered and serialized                                 this process
    start     an empty program compiled: mostly the start of JAX                      child process
    compile   the step compiled and returned, less ``start``                          child process
    read      the scheduled program read                                              this process
    simulate  one step simulated                                                      this process

Each is timed by the clock, and in CPU time of this process and its children, which a busy machine affects less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

import jaxddp
from jaxddp import targets
from jaxddp.instruments.inspect import transformer_training
from jaxddp.instruments.schedule import read_schedule
from jaxddp.instruments.simulate import simulate
from jaxddp.instruments.targets import TargetError, compile_for_target
from jaxddp.models import SIZES
from jaxddp.network import Network
from jaxddp.training.clock import stopwatch

from ..harness.console import progress_of

CURVES = ("devices", "parameters")
NETWORK = Network(50.0)
SEQUENCES_PER_DEVICE = 16
LAYER, WIDTH = 10, 1024  # parameters of a layer, and elements of each: a bias of a small model
TIMEOUT_S = 3600.0  # of one compilation
ONCE_ABOVE = 1000  # parameters: these take minutes, so they get one round

Collectives = list[tuple[str, int]]
Result = TypeVar("Result")


class Seconds(NamedTuple):
    """Wall-clock time and CPU time."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class CompilationSetup:
    """What is compiled: a model for numbers of H100s, and numbers of parameter tensors for 8 of them."""

    num_rounds: int
    model: str = "seed_xl"
    devices: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
    parameters: tuple[int, ...] = (10, 100, 1000, 10_000)


@dataclass
class Point:
    """One size of one curve.

    Attributes:
        planned: Number of collectives in the plan.
        check: ``"ok"``, or what is wrong.
        seconds: Of each part, by round; nothing for the parts after a failure.
    """

    curve: str
    size: int
    target: str
    planned: int = 0
    check: str = "ok"
    seconds: dict[str, list[Seconds]] = field(default_factory=dict)


def measure_curve(console: Console, setup: CompilationSetup, curve: str) -> list[Point]:
    """Times all sizes of a curve in interleaved rounds.

    Raises:
        ValueError: If not even the smallest program can be compiled.
    """
    if curve == "devices":
        points = [Point(curve, size, targets.target(f"h100:{size}").spec) for size in setup.devices]
    else:
        points = [Point(curve, size, "h100:8") for size in setup.parameters]
    turns = [
        point
        for index in range(setup.num_rounds)
        for point in points[index % len(points) :] + points[: index % len(points)]
        if index == 0 or curve == "devices" or point.size <= ONCE_ABOVE
    ]
    with progress_of(console, "compile") as show:
        show(0, ("doing", "warming up"))
        _measure(first := Point("parameters", LAYER, "h100:8"), setup)
        if first.check != "ok":
            raise ValueError(first.check.removeprefix("WRONG: "))
        for done, point in enumerate(turns):
            show(0, ("doing", f"{point.curve}: {point.size:,}"))
            show(0, ("progress", done, len(turns)))
            if point.check == "ok":
                _measure(point, setup)
    return points


def polynomials(params: Sequence[Any], batch: jax.Array) -> jax.Array:
    """A scalar loss of many small parameters: a chain of layers, each a polynomial with ten coefficients."""
    x = jnp.mean(batch, axis=0)
    for start in range(0, len(params), LAYER):
        value, *others = params[start : start + LAYER]
        for coefficient in others:
            value = value * x + coefficient
        x = jnp.tanh(value)
    return jnp.mean(x)


def _measure(point: Point, setup: CompilationSetup) -> None:
    """Compiles a point once and adds its times; after a failure, those of the parts before it."""
    seconds: dict[str, Seconds] = {}
    try:
        planned, compiled = _measure_parts(point, setup, seconds)
    except TargetError as error:
        point.check = f"WRONG: {error}"
    else:
        point.planned = len(planned)
        if sorted(planned) != compiled:
            point.check = f"WRONG: {len(planned)} collectives planned, others found"
    for part, one in seconds.items():
        point.seconds.setdefault(part, []).append(one)


def _measure_parts(
    point: Point, setup: CompilationSetup, seconds: dict[str, Seconds]
) -> tuple[Collectives, Collectives]:
    """Adds times to ``seconds`` by part; returns the planned and the compiled collectives."""
    target = targets.target(point.target)
    trainer, params, batch = (_of_devices if point.curve == "devices" else _of_parameters)(point, setup)
    jax.clear_caches()  # traces of earlier sizes must not shorten this one
    state = trainer.abstract_state(params)

    plan, trace = _timed(lambda: trainer.plan(state, batch))
    tensors = [tensor for bucket in plan.buckets for tensor in bucket.tensors]
    _, seconds["plan"] = _timed(lambda: trainer.strategy.plan(tensors))
    seconds["trace"] = _less(trace, seconds["plan"])
    everywhere = NamedSharding(targets.mesh(point.target), PartitionSpec())
    nothing = (jax.ShapeDtypeStruct((), jnp.float32),)
    _, seconds["start"] = _timed(lambda: compile_for_target(target, lambda x: x, nothing, in_shardings=everywhere))
    pending, seconds["export"] = _timed(lambda: targets.start_compile(trainer, state, batch, timeout_s=TIMEOUT_S))
    program, answer = _timed(pending.result)
    seconds["compile"] = _less(answer, seconds["start"])
    schedule, seconds["read"] = _timed(lambda: read_schedule(program))
    _, seconds["simulate"] = _timed(lambda: simulate(schedule, target.chip, NETWORK))
    return trainer.planned(state, batch), schedule.gradient_collectives()


def _of_devices(point: Point, setup: CompilationSetup) -> tuple[jaxddp.Trainer, Any, Any]:
    training = transformer_training(SIZES[setup.model], SEQUENCES_PER_DEVICE * point.size)
    mesh = targets.mesh(point.target)
    trainer = jaxddp.Trainer(training.loss_fn, training.optimizer, jaxddp.bucketed(), mesh)
    return trainer, training.params, training.batch


def _of_parameters(point: Point, setup: CompilationSetup) -> tuple[jaxddp.Trainer, Any, Any]:
    # An optimizer without state and a bucket per layer: the least that a parameter costs XLA.
    strategy = jaxddp.bucketed(LAYER * WIDTH * 4 / 2**20)
    trainer = jaxddp.Trainer(polynomials, optax.sgd(1e-3), strategy, targets.mesh(point.target))
    params = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)] * point.size
    return trainer, params, jax.ShapeDtypeStruct((trainer.num_ranks, WIDTH), jnp.float32)


def _timed(function: Callable[[], Result]) -> tuple[Result, Seconds]:
    def cpu_s() -> float:
        times = os.times()
        return time.process_time() + times.children_user + times.children_system

    before_s = cpu_s()
    result, wall_s = stopwatch(function, wait=lambda _: None)
    return result, Seconds(wall_s, cpu_s() - before_s)


def _less(whole: Seconds, part: Seconds) -> Seconds:
    """A difference of timings, at least 0."""
    return Seconds(max(whole.wall_s - part.wall_s, 0.0), max(whole.cpu_s - part.cpu_s, 0.0))
