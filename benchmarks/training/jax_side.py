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
from .setup import NUM_PROBED, SILENT, Metrics, Probes, StrategySpec, TrainingSetup

_BY_RANK = PartitionSpec(DATA_AXIS)
_PRECISION = {"f32": "highest", "tf32": "TF32_TF32_F32"}  # by itself JAX takes TF32 on GPUs that have it


class JaxSide:
    """JAX's variants on these ranks, from the same weights and batches."""

    def __init__(self, ranks: Ranks, setup: TrainingSetup) -> None:
        self.setup, self.mesh = setup, ranks.mesh()
        self.device = self.mesh.devices.flat[0].device_kind
        self.versions = {name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax", "optax")}
        self.loss_fn, self.params = build(setup.model)
        self.optimizer = optax.adamw(setup.learning_rate, weight_decay=0.01)
        if ranks.kind == "gpus" and setup.dtype in _PRECISION:
            jax.config.update("jax_default_matmul_precision", _PRECISION[setup.dtype])
        if setup.dtype == "bf16":
            self.params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), self.params)
        self.batches = [jaxddp.local_rows(batch) for batch in setup.batches]
        self.placed = [place(batch, self.mesh) for batch in self.batches]  # before the clock starts

    def make(self, attempt: Attempts, silent: Sequence[StrategySpec]) -> dict[str, Any]:
        """Makes and compiles a run of each strategy, and of those of ``silent`` one without communication.

        One process compiles several programs at a time, since nothing is measured yet; several processes compile in
        the same order, one at a time.
        """
        wanted = [(spec, "") for spec in self.setup.strategies["jaxddp"]] + [(spec, SILENT) for spec in silent]
        say_on_rank(f"jaxddp: compiling {len(wanted)} programs")
        runs, compiling = {}, {}
        with ThreadPoolExecutor(_num_cores() if jax.process_count() == 1 else 1) as pool:
            for spec, suffix in wanted:  # states are made one after the other, because that runs programs
                label = f"jaxddp {spec.label}{suffix}"
                if (run := attempt(label, partial(self._new, spec, sends=not suffix))) is not None:
                    compiling[label] = pool.submit(run.compile)
            for label, compiled in compiling.items():
                if (run := attempt(label, compiled.result)) is not None:
                    runs[label] = run
                say_on_rank()
        return runs

    def _new(self, spec: StrategySpec, *, sends: bool) -> JaxRun:
        if spec.name == "jit":
            return JitRun(self)
        strategy = jaxddp.make_strategy(spec.name, **spec.options)
        return JaxRun(self, strategy if sends else without_communication(strategy), self.mesh, self.placed, sends)

    def reference(self) -> tuple[Metrics, dict[str, np.ndarray]]:
        """Trains on one device alone: the metrics of every round, and the weights after the last."""
        alone = Mesh(np.array(jax.local_devices()[:1]), (DATA_AXIS,))  # data_mesh(1) may be another process's device
        run = JaxRun(self, jaxddp.naive(), alone, self.setup.batches)
        return [run.step(index) for index in range(len(self.setup.batches))], run.weights()

    def probes(self) -> Probes:
        """Forward and backward alone, all-reduces alone, and both at once."""
        mesh, whole = self.mesh, PartitionSpec()
        options = jaxddp.compile_options(jaxddp.bucketed(), platform_of(mesh))
        spread = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, whole))
        params = spread(jax.tree.map(np.asarray, self.params))

        def over_ranks(on_rank: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
            mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
            return jax.jit(mapped, compiler_options=options)

        def local_gradients(params: Any, batch: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf[None], jax.value_and_grad(self.loss_fn)(params, batch))

        def sums_of(buffers: Any) -> Any:
            return jax.lax.psum(buffers, DATA_AXIS)

        def both_of(params: Any, batch: Any, buffers: Any) -> Any:
            return local_gradients(params, batch), sums_of(buffers)

        def buffers_of(num_bytes: int) -> Any:
            zeros = partial(jnp.zeros, (mesh.size * num_bytes // 4,))
            return jax.jit(lambda: [zeros()] * NUM_PROBED, out_shardings=NamedSharding(mesh, _BY_RANK))()

        gradients = over_ranks(local_gradients, (whole, _BY_RANK), _BY_RANK)
        sums = over_ranks(sums_of, _BY_RANK, whole)
        both = over_ranks(both_of, (whole, _BY_RANK, _BY_RANK), (_BY_RANK, whole))
        return Probes(
            buffers_of,
            lambda index: _wait(gradients(params, self.placed[index])),
            lambda buffers, index: _wait(sums(buffers)),
            lambda buffers, index: _wait(both(params, self.placed[index], buffers)),
        )


class JaxRun:
    """A strategy's own copy of the training run.

    Attributes:
        planned: ``(kind, bytes)`` of the collectives that were planned; None of a peer.
        found: Those of the compiled program.
        buckets: Torch's names and the bytes of the tensors of each bucket, in launch order.
    """

    planned: list[tuple[str, int]] | None = None
    found: list[tuple[str, int]] | None = None
    buckets: Sequence[Sequence[tuple[str, int]]] = ()

    def __init__(
        self, side: JaxSide, strategy: jaxddp.Strategy, mesh: Mesh, batches: Sequence[Any], sends: bool = True
    ) -> None:
        self._batches, self._batch, self._sends = batches, side.batches[0], sends
        self._trainer = jaxddp.Trainer(side.loss_fn, side.optimizer, strategy, mesh)
        self._state = self._trainer.init(side.params)
        self._names = dict(zip(jaxddp.named_leaves(side.params), torch_names(side.params), strict=True))

    def compile(self) -> JaxRun:
        """Compiles the step and reads it; returns itself."""
        self.found = jaxddp.gradient_collectives(self._trainer.compile(self._state, self._batch))
        if self.found and not self._sends:
            raise RuntimeError(f"it still has {len(self.found)} collectives")
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
        return _in_float32(self._trainer.params(self._state))

    def step(self, index: int) -> tuple[float, float]:
        """Takes the step of a round: loss and gradient norm, once all of it is done."""
        self._state, metrics = self._trainer.step(self._state, self._batches[index])
        jax.block_until_ready((self._state, metrics))
        return float(metrics["loss"]), float(metrics["grad_norm"])


class JitRun(JaxRun):
    """Data parallelism as JAX does it unasked: ``jit`` with replicated parameters and a sharded batch.

    It gives the same metrics as the trainer, so the two differ in nothing but the communication.
    """

    def __init__(self, side: JaxSide) -> None:
        by_rank, whole = (NamedSharding(side.mesh, spec) for spec in (_BY_RANK, PartitionSpec()))

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            loss, grads = jax.value_and_grad(side.loss_fn)(params, batch)
            updates, opt_state = side.optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), (loss, optax.global_norm(grads))

        def start(params: Any) -> Any:
            return params, side.optimizer.init(params)

        self._state = jax.jit(start, out_shardings=whole)(jax.tree.map(np.asarray, side.params))
        self._jitted = jax.jit(step, in_shardings=(whole, by_rank), out_shardings=whole, donate_argnums=0)
        self._batches = side.placed

    def compile(self) -> JitRun:
        """As that of `JaxRun`."""
        self._program = self._jitted.lower(self._state, self._batches[0]).compile()
        self.found = jaxddp.gradient_collectives(self._program)
        return self

    def weights(self) -> dict[str, np.ndarray]:
        """As that of `JaxRun`."""
        return _in_float32(self._state[0])

    def step(self, index: int) -> tuple[float, float]:
        """As that of `JaxRun`."""
        self._state, (loss, norm) = jax.block_until_ready(self._program(self._state, self._batches[index]))
        return float(loss), float(norm)


def place(batch: Any, mesh: Mesh) -> Any:
    """Puts this process's rows of a batch onto its ranks."""
    by_rank = NamedSharding(mesh, _BY_RANK)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(by_rank, array), batch)


def _wait(value: Any) -> None:
    jax.block_until_ready(value)  # and drop it: rounds keep what they return


def _in_float32(params: Any) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float32) for name, array in to_numpy(params).items()}


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
