"""A training run in JAX: each strategy's own copy, plain ``jit``'s, and probes of what a step is made of."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxddp
from jaxddp.checkpoint.interop import to_numpy, torch_names
from jaxddp.cli.environment import num_cores
from jaxddp.mesh import DATA_AXIS, platform_of
from jaxddp.models import build
from jaxddp.strategy import without_communication
from jaxddp.training.jit_baseline import auto_step

from ..ranks import Ranks, mesh_of
from .setup import AT_ONCE, FORWARD_BACKWARD, NUM_PROBED, Run, StrategySpec, TrainingSetup

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
        return self._start(jaxddp.naive(), alone, self.setup.batches)()

    def _start(
        self, strategy: jaxddp.Strategy, mesh: Mesh, batches: Sequence[Any], *, sends: bool = True, is_jit: bool = False
    ) -> Callable[[], Run]:
        trainer = jaxddp.Trainer(self.loss_fn, self.optimizer, strategy, mesh)
        state, given = trainer.init(self.params), jaxddp.local_rows(self.setup.batches[0])
        names = dict(zip(jaxddp.named_leaves(self.params), torch_names(self.params), strict=True))

        def compile_step() -> Run:
            program = self._compile_jit(state) if is_jit else trainer.compile(state, given)
            take = program if is_jit else trainer.step

            def step(index: int) -> tuple[float, float]:
                nonlocal state
                state, metrics = jax.block_until_ready(take(state, batches[index]))
                return float(metrics["loss"]), float(metrics["grad_norm"])

            found = jaxddp.gradient_collectives(program)
            if found and not sends:
                raise RuntimeError(f"it still has {len(found)} collectives")
            run = Run(step, lambda: _in_float32(trainer.params(state)), None, found)
            if is_jit:
                return run
            plan, trace = trainer.plan(state, given), trainer.programs(state).trace(state, given)
            buckets = [[(names[one.name], one.num_bytes) for one in bucket.tensors] for bucket in plan.buckets]
            ready = zip(trace.tensors.values(), trace.flops_before, strict=True)
            shares = {names[tensor.name]: share for tensor, share in ready}
            return run._replace(planned=trainer.planned(state, given), buckets=buckets, ready_shares=shares)

        return compile_step

    def _compile_jit(self, state: Any) -> Any:
        whole, by_rank = (NamedSharding(self.mesh, spec) for spec in (_WHOLE, _BY_RANK))
        step = auto_step(self.loss_fn, self.optimizer)
        jitted = jax.jit(step, in_shardings=(whole, by_rank), out_shardings=whole, donate_argnums=0)
        return jitted.lower(state, self.batches[0]).compile()

    def probes(self, sizes: Sequence[int]) -> dict[str, Callable[[int], None]]:
        """Forward and backward alone, all-reduces of these sizes alone, and both at once."""
        options = jaxddp.compile_options(jaxddp.bucketed(), platform_of(self.mesh))
        whole = NamedSharding(self.mesh, _WHOLE)
        params = jax.jit(lambda tree: tree, out_shardings=whole)(jax.tree.map(np.asarray, self.params))

        def over_ranks(on_rank: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
            mapped = jax.shard_map(on_rank, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)
            return jax.jit(mapped, compiler_options=options)

        def local_gradients(params: Any, batch: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf[None], jax.value_and_grad(self.loss_fn)(params, batch))

        def buffers_of(num_bytes: int) -> Any:
            zeros = partial(jnp.zeros, (self.mesh.size * num_bytes // 4,))
            return jax.jit(lambda: [zeros()] * NUM_PROBED, out_shardings=NamedSharding(self.mesh, _BY_RANK))()

        gradients = over_ranks(local_gradients, (_WHOLE, _BY_RANK), _BY_RANK)
        sums_of, buffers = partial(jax.lax.psum, axis_name=DATA_AXIS), {size: buffers_of(size) for size in sizes}
        sums = over_ranks(sums_of, _BY_RANK, _WHOLE)
        both = over_ranks(
            lambda params, batch, buffers: (local_gradients(params, batch), sums_of(buffers)),
            (_WHOLE, _BY_RANK, _BY_RANK), (_BY_RANK, _WHOLE),
        )  # fmt: skip

        def all_reduce(size: int, index: int) -> None:
            _wait(sums(buffers[size]))

        return {
            FORWARD_BACKWARD: lambda index: _wait(gradients(params, self.batches[index])),
            AT_ONCE: lambda index: _wait(both(params, self.batches[index], buffers[sizes[-2]])),
            **{f"all-reduce {size}": partial(all_reduce, size) for size in sizes},
        }


def place(batch: Any, mesh: Mesh) -> Any:
    """Puts this process's rows of a batch onto its ranks."""
    by_rank = NamedSharding(mesh, _BY_RANK)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(by_rank, array), batch)


def _wait(value: Any) -> None:
    jax.block_until_ready(value)  # and drop it: rounds keep what they return


def _in_float32(params: Any) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float32) for name, array in to_numpy(params).items()}
