"""What takes turns in JAX: a strategy's copy of the training run, plain ``jit``'s, and probes of what they are made of.

Where ranks are processes, each holds the rows of the global batch that are its own, and every program spans them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxddp
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.mesh import platform_of
from jaxddp.training.data import Batch
from jaxddp.training.jit_baseline import auto_step
from jaxddp.training.validation import abstract

from .interleaving import Variant
from .measure import AT_ONCE, FORWARD_BACKWARD, NUM_PROBED, StepMetrics, TrainingSetup, all_reduce_label


class Planned:
    """A strategy's own copy of the training run; what `Measured` says of it is there once it is compiled."""

    def __init__(self, trainer: jaxddp.Trainer, params: Any, batches: Sequence[Any]) -> None:
        """Starts the run with a copy of the parameters; ``batches`` are on the mesh, or placed by the trainer."""
        self._trainer, self._batches, self._state = trainer, batches, trainer.init(params)
        self.planned: list[tuple[str, int]] | None = None
        self.found: list[tuple[str, int]] | None = None
        self.buckets: list[list[tuple[str, int]]] = []
        self.schedule: Any = None

    def compile(self, batch: Batch, names: dict[str, str] | None, with_schedule: bool) -> Planned:
        """Compiles the step, and reads it unless ``names``, torch's by ours, is None; returns itself."""
        program = self._trainer.compile(self._state, batch)
        if names is None:
            return self
        self.planned = self._trainer.planned(self._state, batch)
        self._read(program, with_schedule)
        self.buckets = [
            [(names[tensor.name], tensor.num_bytes) for tensor in bucket.tensors]
            for bucket in self._trainer.plan(self._state, batch).buckets
        ]
        return self

    def _read(self, program: Any, with_schedule: bool) -> None:
        schedule = jaxddp.read_schedule(program)
        self.found = schedule.gradient_collectives()
        self.schedule = schedule if with_schedule else None

    def weights(self) -> dict[str, np.ndarray]:
        """The whole parameters, in float32 and by the names of torch."""
        return in_float32(self._trainer.params(self._state))

    def step(self, index: int) -> StepMetrics:
        """Takes the step of a round."""
        metrics = self.start(index)
        return StepMetrics(float(metrics["loss"]), float(metrics["grad_norm"]))

    def start(self, index: int) -> dict[str, jax.Array]:
        """Starts the step of a round, and on CPUs waits for it."""
        self._state, metrics = self._trainer.step(self._state, self._batches[index])
        return metrics


class Jit(Planned):
    """Data parallelism as JAX does it unasked: ``jit`` with replicated parameters and a sharded batch.

    It computes the same metrics as the trainer, so that the two differ in nothing but the communication. It plans
    nothing.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        params: Any,
        batches: Sequence[Any],
    ) -> None:
        """Starts the run."""
        super().__init__(jaxddp.Trainer(loss_fn, optimizer, jaxddp.naive(), mesh), params, batches)
        by_rank = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        replicated = NamedSharding(mesh, PartitionSpec())
        self._is_on_cpu = platform_of(mesh) == "cpu"
        self._jitted = jax.jit(
            auto_step(loss_fn, optimizer),
            in_shardings=(replicated, by_rank),
            out_shardings=replicated,
            donate_argnums=0,
        )

    def compile(self, batch: Batch, names: dict[str, str] | None, with_schedule: bool) -> Jit:
        """As that of `Planned`."""
        del names
        self._program = self._jitted.lower(abstract(self._state), abstract(batch)).compile()
        self._read(self._program, with_schedule)
        return self

    def start(self, index: int) -> dict[str, jax.Array]:
        """Starts the step of a round, and on CPUs waits for it."""
        self._state, metrics = self._program(self._state, self._batches[index])
        if self._is_on_cpu:
            jax.block_until_ready(self._state)
        return metrics


def in_float32(params: Any) -> dict[str, np.ndarray]:
    """Copies parameters to NumPy, by the names of torch."""
    return {name: array.astype(np.float32) for name, array in to_numpy(params).items()}


def rows_of_process(batch: Batch) -> Batch:
    """Takes this process's rows of a global batch."""
    count, index = jax.process_count(), jax.process_index()
    size = len(next(iter(batch.values()))) // count
    return {name: array[index * size : (index + 1) * size] for name, array in batch.items()}


def probes(
    setup: TrainingSetup, loss_fn: Callable[..., Any], params: Any, mesh: Mesh, batches: Sequence[Any]
) -> list[Variant]:
    """Makes probes of the components of a step: forward and backward alone, all-reduces alone, and both at once."""
    by_rank, axis = NamedSharding(mesh, PartitionSpec(mesh.axis_names)), PartitionSpec(mesh.axis_names)
    replicated = NamedSharding(mesh, PartitionSpec())
    options = jaxddp.compile_options(jaxddp.bucketed(), platform_of(mesh))

    def over_ranks(on_rank: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
        return jax.jit(mapped, compiler_options=options)

    def local_gradients(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], jax.value_and_grad(loss_fn)(params, batch))

    gradients = over_ranks(local_gradients, (PartitionSpec(), axis), axis)
    held = jax.jit(lambda tree: tree, out_shardings=replicated)(jax.tree.map(np.asarray, params))

    def forward_backward(index: int) -> None:
        jax.block_until_ready(gradients(held, batches[index]))

    def sums_of_buffers(buffers: Any) -> Any:
        return jax.lax.psum(buffers, mesh.axis_names[0])

    def zeros_of(num_bytes: int) -> Any:
        shape = (mesh.size * num_bytes // 4,)
        return jax.jit(lambda: [jnp.zeros(shape)] * NUM_PROBED, out_shardings=by_rank)()

    sums = over_ranks(sums_of_buffers, axis, PartitionSpec())
    variants = [Variant(FORWARD_BACKWARD, forward_backward)]
    for num_bytes in setup.probe_bytes:
        zeros = zeros_of(num_bytes)

        def all_reduce(index: int, zeros: Any = zeros) -> None:
            del index
            jax.block_until_ready(sums(zeros))

        variants.append(Variant(all_reduce_label(num_bytes), all_reduce))
    both = over_ranks(
        lambda params, batch, buffers: (local_gradients(params, batch), sums_of_buffers(buffers)),
        (PartitionSpec(), axis, axis),
        (axis, PartitionSpec()),
    )
    beside = zeros_of(setup.probe_bytes[-2])

    def at_once(index: int) -> None:
        jax.block_until_ready(both(held, batches[index], beside))

    return [*variants, Variant(AT_ONCE, at_once)]


def place(batch: Batch, mesh: Mesh) -> Any:
    """Puts this process's rows of a batch onto its ranks."""
    by_rank = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    if jax.process_count() == 1:
        return jax.device_put(batch, by_rank)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(by_rank, array), batch)
