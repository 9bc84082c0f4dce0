"""A training run in JAX: each strategy's own copy, and plain ``jit``'s."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxddp
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.cli.doctor import num_cores
from jaxddp.mesh import DATA_AXIS
from jaxddp.models import build
from jaxddp.strategy import without_communication
from jaxddp.training.step import auto_step

from ..ranks import Ranks, mesh_of
from .setup import Run, StrategySpec, TrainingSetup

_BY_RANK, _WHOLE = PartitionSpec(DATA_AXIS), PartitionSpec()
_PRECISION = {"f32": "highest", "tf32": "TF32_TF32_F32"}  # by itself JAX takes TF32 on GPUs that have it


class JaxSide:
    """JAX's variants on these ranks, from the same weights and batches."""

    def __init__(self, ranks: Ranks, setup: TrainingSetup) -> None:
        self.setup, self.mesh = setup, mesh_of(ranks)
        # Several processes have to compile in the same order.
        self.num_compilers = num_cores() if jax.process_count() == 1 else 1
        self.loss_fn, self.params = build(setup.model)
        self.optimizer = optax.adamw(setup.learning_rate, weight_decay=0.01)
        if ranks.kind == "gpus" and setup.dtype in _PRECISION:
            jax.config.update("jax_default_matmul_precision", _PRECISION[setup.dtype])
        if setup.dtype == "bf16":
            self.params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), self.params)
        self.batches = [place(jaxddp.local_rows(batch), self.mesh) for batch in setup.batches]  # before the clock

    def start(self, spec: StrategySpec, *, sends: bool) -> Callable[[], Run]:
        """Makes the state of a run, and gives what compiles its step."""
        if spec.name == "jit":  # data parallelism as JAX does it unasked, with the metrics of the trainer
            return self._start(jaxddp.naive(), self.mesh, self.batches, is_jit=True)
        strategy = jaxddp.make_strategy(spec.name, **spec.options)
        return self._start(strategy if sends else without_communication(strategy), self.mesh, self.batches, sends=sends)

    def reference(self) -> Run:
        """Training on one device alone."""
        alone = Mesh(np.array(jax.local_devices()[:1]), (DATA_AXIS,))  # data_mesh(1) may be another process's device
        num_parts = self.mesh.size  # as many examples at once as a rank has, so that it needs no more memory
        return self._start(jaxddp.naive(), alone, self.setup.batches, num_microbatches=num_parts)()

    def _start(
        self, strategy: jaxddp.Strategy, mesh: Mesh, batches: Sequence[Any], *, sends: bool = True,
        is_jit: bool = False, num_microbatches: int = 1,
    ) -> Callable[[], Run]:  # fmt: skip
        trainer = jaxddp.Trainer(self.loss_fn, self.optimizer, strategy, mesh, num_microbatches=num_microbatches)
        state = trainer.init(self.params)

        def compile_step() -> Run:
            program = self._compile_jit(state) if is_jit else trainer.compile(state, batches[0])
            take = program if is_jit else trainer.step

            def step(index: int) -> tuple[float, float]:
                nonlocal state
                state, metrics = jax.block_until_ready(take(state, batches[index]))
                return float(metrics["loss"]), float(metrics["grad_norm"])

            found = jaxddp.gradient_collectives(program)
            if found and not sends:
                raise RuntimeError(f"it still has {len(found)} collectives")
            planned = None if is_jit else trainer.planned(state, batches[0])
            return Run(step, lambda: _in_float32(trainer.params(state)), planned, found)

        return compile_step

    def _compile_jit(self, state: Any) -> Any:
        whole, by_rank = (NamedSharding(self.mesh, spec) for spec in (_WHOLE, _BY_RANK))
        step = auto_step(self.loss_fn, self.optimizer)
        jitted = jax.jit(step, in_shardings=(whole, by_rank), out_shardings=whole, donate_argnums=0)
        return jitted.lower(state, self.batches[0]).compile()


def place(batch: Any, mesh: Mesh) -> Any:
    """Puts this process's rows of a batch onto its ranks."""
    by_rank = NamedSharding(mesh, _BY_RANK)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(by_rank, array), batch)


def _in_float32(params: Any) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float32) for name, array in to_numpy(params).items()}
