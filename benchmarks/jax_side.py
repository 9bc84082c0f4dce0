"""Every variant of a setup in JAX: one process, a rank for each of its devices."""

from __future__ import annotations

from typing import Any

import jaxddp  # first: it imports JAX without what plugins print whose devices are not there

# isort: split
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxddp import compression
from jaxddp.allocator import keep_freed_memory
from jaxddp.auto import auto_step
from jaxddp.interop import to_numpy
from jaxddp.mesh import mesh_of_machine
from jaxddp.models import build
from torchref.launch import report

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


def run(setup: Setup) -> SideResult:
    """Trains under every strategy; runs in a process of its own, before JAX has started there.

    Args:
        setup: What to train.

    Returns:
        What was found.
    """
    keep_freed_memory()
    mesh = mesh_of_machine(None, setup.num_ranks)
    if mesh.size > setup.num_ranks:
        mesh = jaxddp.data_mesh(setup.num_ranks)
    loss_fn, params = build(setup.model, seed=setup.seed)
    optimizer = optax.adamw(setup.learning_rate, weight_decay=0.01)

    report(("doing", "single-process training"))
    reference = _Run(setup, jaxddp.Trainer(loss_fn, optimizer, jaxddp.naive(), jaxddp.data_mesh(1)), params)
    expected = [reference.step(index) for index in range(len(setup.batches))]
    trained = to_numpy(reference.state.params)
    del reference

    runs: dict[str, _Run | _Peer] = {}
    for spec in setup.strategies:
        for label, wire in ((spec.label, compression.none), (spec.label + BASELINE, compression.noop)):
            if wire.sends or setup.with_baselines:
                report(("doing", f"compiling {label}"))
                runs[label] = _Run(setup, jaxddp.Trainer(loss_fn, optimizer, _strategy(spec, wire), mesh), params)
                runs[label].compile()
    if setup.with_peer:
        report(("doing", "compiling jit with replicated parameters"))
        runs["peer"] = _Peer(setup, loss_fn, optimizer, mesh, params)
        runs["peer"].compile()

    report(("doing", "training"))
    times = interleave([Variant(label, one.step) for label, one in runs.items()], len(setup.batches), setup.num_warmup)
    measured = {}
    for label, one in runs.items():
        if not label.endswith(BASELINE):
            metrics, seconds = times[label]
            difference = largest_difference(to_numpy(one.params()), trained)
            baseline = times.get(label + BASELINE, ([], []))[1]
            measured[label] = Measured(one.planned, one.compiled, metrics, expected, difference, seconds, baseline)
    device = mesh.devices.flat[0]
    simulated = device.platform == "cpu"
    return SideResult(
        num_ranks=int(mesh.size),
        kind="simulated" if simulated else "GPUs",
        ranks=f"{mesh.size} {'simulated CPU devices' if simulated else 'GPUs'} in one process",
        backend="XLA in-process" if simulated else "XLA over NCCL",
        device=device.device_kind,
        versions={name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax", "optax")},
        weights=to_numpy(params),
        trained=trained,
        measured=measured,
    )


def _strategy(spec: StrategySpec, wire: compression.Compression) -> jaxddp.Strategy:
    options: dict[str, Any] = {} if spec.bucket_mb is None else {"bucket_mb": spec.bucket_mb}
    return jaxddp.make_strategy(spec.name, compression=wire, **options)


class _Run:
    """A strategy's own copy of the training run."""

    def __init__(self, setup: Setup, trainer: jaxddp.Trainer, params: Any) -> None:
        self._batches, self._trainer, self.state = setup.batches, trainer, trainer.init(params)

    def compile(self) -> None:
        self.planned = self._trainer.planned(self.state, self._batches[0])
        self.compiled = jaxddp.gradient_collectives(self._trainer.compile(self.state, self._batches[0]))

    def params(self) -> Any:
        return self._trainer.params(self.state)

    def step(self, index: int) -> StepMetrics:
        self.state, metrics = self._trainer.step(self.state, self._batches[index])
        return StepMetrics(float(metrics["loss"]), float(metrics["grad_norm"]))


class _Peer:
    """Data parallelism as JAX does it unasked: ``jit`` with replicated parameters and a sharded batch.

    It computes the same metrics as the trainer, so that the two differ in nothing but the communication.
    """

    def __init__(self, setup: Setup, loss_fn: Any, optimizer: Any, mesh: Mesh, params: Any) -> None:
        replicated = NamedSharding(mesh, PartitionSpec())
        by_rank = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.planned: list[tuple[str, int]] = []

        self._batches, self._by_rank = setup.batches, by_rank
        self._step = jax.jit(
            auto_step(loss_fn, optimizer),
            in_shardings=(replicated, by_rank),
            out_shardings=replicated,
            donate_argnums=0,
        )
        params = jax.device_put(jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params), replicated)
        opt_state = jax.jit(optimizer.init, out_shardings=replicated)(params)
        zero, key = jax.device_put((jnp.zeros((), jnp.int32), jax.random.key(0)), replicated)
        self.state = jaxddp.TrainState(zero, params, opt_state, key)

    def compile(self) -> None:
        batch = jax.device_put(self._batches[0], self._by_rank)
        self._program = self._step.lower(self.state, batch).compile()
        self.compiled = jaxddp.gradient_collectives(self._program)

    def params(self) -> Any:
        return self.state.params

    def step(self, index: int) -> StepMetrics:
        batch = jax.device_put(self._batches[index], self._by_rank)
        self.state, metrics = jax.block_until_ready(self._program(self.state, batch))
        return StepMetrics(float(metrics["loss"]), float(metrics["grad_norm"]))
