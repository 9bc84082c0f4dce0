"""A training run in JAX: each strategy's own copy, plain ``jit``'s, and probes of what a step is made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxddp
from jaxddp.checkpoint.interop import to_numpy, torch_names
from jaxddp.mesh import DATA_AXIS, platform_of
from jaxddp.models import build
from jaxddp.strategy import without_communication

from ..ranks import Ranks, say_on_rank
from ..timing import Attempts
from .setup import AT_ONCE, FORWARD_BACKWARD, NUM_PROBED, SILENT, StrategySpec, TrainingSetup, all_reduce_label

FRAMEWORK = "jaxddp"
_PRECISION = {"f32": "highest", "tf32": "TF32_TF32_F32"}  # by itself JAX takes TF32 on GPUs that have it


class JaxSide:
    """JAX's variants on these ranks; ``runs`` are made by ``make``."""

    def __init__(self, ranks: Ranks, setup: TrainingSetup) -> None:
        """Starts JAX, and makes the weights and batches that all share."""
        self.setup, self.mesh = setup, ranks.mesh()
        self.device = self.mesh.devices.flat[0].device_kind
        self.versions = {name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax", "optax")}
        self.loss_fn, self.params = build(setup.model, seed=setup.seed)
        self.optimizer = optax.adamw(setup.learning_rate, weight_decay=0.01)
        if ranks.kind == "gpus" and setup.dtype in _PRECISION:
            jax.config.update("jax_default_matmul_precision", _PRECISION[setup.dtype])
        if setup.dtype == "bf16":
            self.params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), self.params)
        self.batches = [jaxddp.local_rows(batch) for batch in setup.batches]
        self.placed = [_place(batch, self.mesh) for batch in self.batches]  # before the clock starts

    def make(self, attempt: Attempts, silent: Sequence[StrategySpec]) -> dict[str, Any]:
        """Makes and compiles a run of each strategy; those of ``silent`` also without communication.

        Programs compile several at a time in one process, since nothing is measured yet; several processes compile in
        the same order, one at a time.
        """
        num_threads = _num_cores() if jax.process_count() == 1 else 1
        runs: dict[str, Any] = {}
        with ThreadPoolExecutor(num_threads) as pool:

            def compile_all(specs: Sequence[StrategySpec], suffix: str) -> None:
                pending = {}
                for spec in specs:  # states are made one after the other, because that runs programs
                    label = f"{FRAMEWORK} {spec.label}{suffix}"
                    if (run := attempt(label, partial(self._new, spec, sends=not suffix))) is not None:
                        pending[label] = pool.submit(run.compile)
                for label, compiled in pending.items():
                    if (run := attempt(label, compiled.result)) is not None:
                        runs[label] = run
                    say_on_rank()

            say_on_rank(f"{FRAMEWORK}: compiling {len(self.setup.strategies[FRAMEWORK]) + len(silent)} programs")
            compile_all(self.setup.strategies[FRAMEWORK], "")
            compile_all(silent, SILENT)
        for label in [label for label in runs if label.endswith(SILENT) and runs[label].found]:
            attempt.failed[label] = f"it still has {len(runs[label].found)} collectives"
            del runs[label]
        return runs

    def _new(self, spec: StrategySpec, *, sends: bool) -> JaxRun | JitRun:
        if spec.name == "jit":
            return JitRun(self)
        options: dict[str, Any] = {} if spec.bucket_mb is None else {"bucket_mb": spec.bucket_mb}
        strategy = jaxddp.make_strategy(spec.name, **options)
        return JaxRun(self, strategy if sends else without_communication(strategy), self.mesh, self.placed)

    def reference(self) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
        """Trains on one device alone: the metrics of every round, and the weights after the last."""
        alone = Mesh(np.array(jax.local_devices()[:1]), (DATA_AXIS,))  # data_mesh(1) may be another process's device
        run = JaxRun(self, jaxddp.naive(), alone, self.setup.batches)
        return [run.step(index) for index in range(len(self.setup.batches))], run.weights()

    def probes(self) -> dict[str, Callable[[int], None]]:
        """Forward and backward alone, all-reduces alone, and both at once."""
        mesh, setup = self.mesh, self.setup
        axis, by_rank = PartitionSpec(DATA_AXIS), NamedSharding(mesh, PartitionSpec(DATA_AXIS))
        options = jaxddp.compile_options(jaxddp.bucketed(), platform_of(mesh))

        def over_ranks(on_rank: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
            mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
            return jax.jit(mapped, compiler_options=options)

        def local_gradients(params: Any, batch: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf[None], jax.value_and_grad(self.loss_fn)(params, batch))

        def sums_of(buffers: Any) -> Any:
            return jax.lax.psum(buffers, DATA_AXIS)

        def zeros_of(num_bytes: int) -> Any:
            shape = (mesh.size * num_bytes // 4,)
            return jax.jit(lambda: [jnp.zeros(shape)] * NUM_PROBED, out_shardings=by_rank)()

        def both_of(params: Any, batch: Any, buffers: Any) -> Any:
            return local_gradients(params, batch), sums_of(buffers)

        whole = NamedSharding(mesh, PartitionSpec())
        params = jax.jit(lambda tree: tree, out_shardings=whole)(jax.tree.map(np.asarray, self.params))
        gradients = over_ranks(local_gradients, (PartitionSpec(), axis), axis)
        sums = over_ranks(sums_of, axis, PartitionSpec())
        both = over_ranks(both_of, (PartitionSpec(), axis, axis), (axis, PartitionSpec()))
        beside = zeros_of(setup.probe_bytes[-2])
        found: dict[str, Callable[[int], None]] = {
            FORWARD_BACKWARD: lambda index: _wait(gradients(params, self.placed[index])),
            AT_ONCE: lambda index: _wait(both(params, self.placed[index], beside)),
        }
        for num_bytes in setup.probe_bytes:
            zeros = zeros_of(num_bytes)
            found[all_reduce_label(num_bytes)] = partial(lambda zeros, index: _wait(sums(zeros)), zeros)
        return {f"{FRAMEWORK} {label}": probe for label, probe in found.items()}


class JaxRun:
    """A strategy's own copy of the training run.

    Attributes:
        planned: ``(kind, bytes)`` of the collectives that were planned; None of a peer.
        found: Those of the compiled program.
        buckets: Torch's names and the bytes of the tensors of each bucket, in launch order.
        program: What the step was compiled to.
    """

    planned: list[tuple[str, int]] | None = None
    found: list[tuple[str, int]] | None = None

    def __init__(self, side: JaxSide, strategy: jaxddp.Strategy, mesh: Mesh, batches: Sequence[Any]) -> None:
        """Starts the run with a copy of the parameters."""
        self._batches, self._batch = batches, side.batches[0]
        self._trainer = jaxddp.Trainer(side.loss_fn, side.optimizer, strategy, mesh)
        self._state = self._trainer.init(side.params)
        self._names = dict(zip(jaxddp.named_leaves(side.params), torch_names(side.params), strict=True))
        self.buckets: list[list[tuple[str, int]]] = []
        self.program: Any = None

    def compile(self) -> JaxRun:
        """Compiles the step and reads it; returns itself."""
        self.program = self._trainer.compile(self._state, self._batch)
        self.found = jaxddp.gradient_collectives(self.program)
        self.planned = self._trainer.planned(self._state, self._batch)
        plan = self._trainer.plan(self._state, self._batch)
        self.buckets = [[(self._names[one.name], one.num_bytes) for one in bucket.tensors] for bucket in plan.buckets]
        return self

    def ready_shares(self) -> dict[str, float]:
        """The share of a rank's matrix products that is done before each gradient is ready, by torch's names."""
        trace = self._trainer.trace(self._state, self._batch)
        shares = zip(trace.tensors, trace.flops_before, strict=True)
        return {self._names[tensor.name]: share for tensor, share in shares}

    def weights(self) -> dict[str, np.ndarray]:
        """The whole parameters, in float32 and by the names of torch."""
        return in_float32(self._trainer.params(self._state))

    def start(self, index: int) -> Any:
        """Starts the step of a round; its metrics."""
        self._state, metrics = self._trainer.step(self._state, self._batches[index])
        return metrics

    def step(self, index: int) -> tuple[float, float]:
        """Takes the step of a round: loss and gradient norm, once all of it is done."""
        metrics = jax.block_until_ready(self.start(index))
        jax.block_until_ready(self._state)
        return float(metrics["loss"]), float(metrics["grad_norm"])


class JitRun(JaxRun):
    """Data parallelism as JAX does it unasked: ``jit`` with replicated parameters and a sharded batch.

    It gives the same metrics as the trainer, so the two differ in nothing but the communication.
    """

    def __init__(self, side: JaxSide) -> None:
        """Starts the run."""
        by_rank, whole = (NamedSharding(side.mesh, spec) for spec in (PartitionSpec(DATA_AXIS), PartitionSpec()))

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            loss, grads = jax.value_and_grad(side.loss_fn)(params, batch)
            updates, opt_state = side.optimizer.update(grads, opt_state, params)
            metrics = {"loss": loss, "grad_norm": optax.global_norm(grads)}
            return (optax.apply_updates(params, updates), opt_state), metrics

        def start(params: Any) -> Any:
            return params, side.optimizer.init(params)

        self._jitted = jax.jit(step, in_shardings=(whole, by_rank), out_shardings=whole, donate_argnums=0)
        self._state = jax.jit(start, out_shardings=whole)(jax.tree.map(np.asarray, side.params))
        self._batches, self.buckets = side.placed, []

    def compile(self) -> JitRun:
        """As that of `JaxRun`."""
        self.program = self._jitted.lower(self._state, self._batches[0]).compile()
        self.found = jaxddp.gradient_collectives(self.program)
        return self

    def weights(self) -> dict[str, np.ndarray]:
        """As that of `JaxRun`."""
        return in_float32(self._state[0])

    def start(self, index: int) -> Any:
        """As that of `JaxRun`."""
        self._state, metrics = self.program(self._state, self._batches[index])
        return metrics


def in_float32(params: Any) -> dict[str, np.ndarray]:
    """Copies parameters to NumPy, by the names of torch."""
    return {name: array.astype(np.float32) for name, array in to_numpy(params).items()}


def _place(batch: Any, mesh: Mesh) -> Any:
    """Puts this process's rows of a batch onto its ranks."""
    by_rank = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    if jax.process_count() == 1:
        return jax.device_put(batch, by_rank)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(by_rank, array), batch)


def _wait(value: Any) -> None:
    jax.block_until_ready(value)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
