"""The programs of one model under one trainer: traced, planned, and compiled once for each shape of state and batch."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from ..communication.buckets import BucketPlan
from ..communication.planned import Planned, planned_along, planned_exchange, traced_collectives
from ..communication.traces import GradientTrace, plan_trace, trace_gradients
from ..layout import Leaf
from ..mesh import platform_of
from ..scopes import OTHER_AXES_SCOPE
from ..strategy import Masters, on_blocks
from ..tree import named_leaves, split
from . import step as steps
from .step import Run, TrainState
from .validation import abstract, check_batch, host_arrays, signature
from .xla import compile_options

# ``(function, args, **options)`` to a compiled program; the options are those of ``jax.jit``.
Compile = Callable[..., Any]
StepFunction = tuple[Callable[..., Any], tuple[Any, Any], dict[str, Any]]
"""A function over a mesh, its abstract arguments, and the options of ``jax.jit`` to compile it with."""

COMPILERS: dict[AbstractDevice, Compile] = {}  # of devices that are not there; who makes a mesh of them adds its own


def compiler_of(mesh: Mesh | AbstractMesh) -> Compile:
    """What compiles for a mesh; a ValueError if it has no devices and ``COMPILERS`` has none for it."""
    if isinstance(mesh, Mesh):
        return lambda function, args, **options: jax.jit(function, **options).lower(*args).compile()
    if mesh.abstract_device not in COMPILERS:
        raise ValueError(f"mesh (={mesh}) has no devices: make it with jaxddp.data_mesh or jaxddp.targets.mesh")
    return COMPILERS[mesh.abstract_device]


def no_mesh() -> AbstractContextManager[Any]:
    """Puts the mesh out of force that the caller has set by ``jax.set_mesh``, for what runs on other devices."""
    return nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(Mesh(np.empty((), object), ()))


class Programs:
    """Plans and programs of one model over one mesh, made when they are first asked for.

    ``held`` describes a state of step 0, as it lies over the ranks, without a model state; ``shardings`` has that of
    each of its leaves, and ``batch_sharding`` is that of a batch's arrays.
    """

    def __init__(self, run: Run, mesh: Mesh | AbstractMesh) -> None:
        """Makes nothing yet; the loss of ``run`` is of full parameters."""
        loss, strategy = run.strategy.full(run.loss, run.layout), on_blocks(run.strategy, run.layout)
        self.layout, self.run = run.layout, run._replace(loss=loss, strategy=strategy)
        self.platform, self._mesh = platform_of(mesh), mesh
        self._compile, self._options = compiler_of(mesh), compile_options(run.strategy, self.platform)
        self._axis = axis = run.layout.ranks.axis

        def state(of: Callable[[Leaf], Any], other: Any) -> TrainState:
            params, opt_state = jax.tree.map(of, (self.layout.params, self.layout.opt_state))
            return TrainState(other, params, opt_state, other, other)

        step, key = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), jax.random.key(0)))
        self.held = state(lambda leaf: leaf.held, ())._replace(step=step, key=key)
        self.shardings = state(lambda leaf: leaf.sharding(mesh, axis), NamedSharding(mesh, P()))
        self._specs = state(lambda leaf: leaf.rank_spec(axis), P())
        self.batch_sharding = NamedSharding(mesh, P(axis))
        self._traces: dict[Any, GradientTrace] = {}
        self._programs: dict[Any, Any] = {}

    def init_opt_state(self, updated: Any) -> Any:
        """Makes the optimizer's state of step 0 from what ranks update; each makes its own part."""
        trained = split(self.layout.updated, self.layout.trainable)[0]
        specs = jax.tree.map(lambda leaf: leaf.rank_spec(self._axis), trained)
        init = self._map(self.layout.optimizer.init, (specs,), self._specs.opt_state)
        with no_mesh():
            return jax.jit(init, out_shardings=self.shardings.opt_state)(updated)

    def trace(self, state: TrainState, batch: Any) -> GradientTrace:
        """Traces one rank's backward pass, once for each shape: gradients in the order in which they become ready."""
        run = self.run
        check_batch(batch, run.layout.ranks.num_ranks, run.num_microbatches)
        state, batch = self._typed(state, batch)
        key = signature(state.params, state.model_state, batch)
        if key not in self._traces:
            found = []

            def on_rank(state: TrainState, batch: Any) -> None:
                # [examples of this rank, ...] -> [examples of a micro-batch, ...]
                microbatch = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] // run.num_microbatches], batch)
                args = *split(state.params, run.layout.trainable), state.model_state, microbatch, state.key
                grad_fn = partial(steps.local_gradients, run)
                found.append(trace_gradients(grad_fn, *args, has_aux=True, reduced=run.layout.held))

            # Traced, not run: inside of shard_map, where a loss may use the ranks' axis.
            with no_mesh():
                jax.eval_shape(self._map(on_rank, (self._specs, P(self._axis)), P()), state, batch)
            (trace,) = found
            if self.layout.ranks.other_axes:  # a device sends blocks
                blocks = {name: leaf.block for name, leaf in named_leaves(self.layout.params).items()}
                tensors, constants = (
                    {at: one._replace(shape=blocks[one.name]) for at, one in some.items()}
                    for some in (trace.tensors, trace.constants)
                )
                trace = trace._replace(tensors=tensors, constants=constants)
            self._traces[key] = trace
        return self._traces[key]

    def plan(self, state: TrainState, batch: Any) -> BucketPlan:
        """Gives the bucket plan of the step, in the order of the trace; on one rank nothing is communicated."""
        dtypes = {name: str(leaf.dtype) for name, leaf in named_leaves(self.layout.params).items()}
        plan = plan_trace(self.run.strategy, self.trace(state, batch), dtypes)
        return plan if self.layout.ranks.num_ranks > 1 else replace(plan, buckets=(), gathers=())

    def planned_along(self, state: TrainState, batch: Any) -> list[Planned]:
        """Lists the collectives that one step should have, without those of its metrics."""
        run, ranks = self.run, self.layout.ranks
        trace, plan = self.trace(state, batch), self.plan(state, batch)
        planned = planned_along(run.strategy, plan, ranks, self.platform, run.num_microbatches)
        if self.layout.owners is not None and planned:
            # Gradients, parameters where they are masters, and back.
            num_swaps = 1 + self.layout.owners.uses_grads + isinstance(self.layout.opt_state, Masters)
            for elements, dtype in self.layout.owners.swapped:
                swap = planned_exchange("all-to-all", elements, dtype, ranks.num_shards, self.platform)
                planned += num_swaps * [Planned(*swap, (ranks.shard_axis,))]
        if self.layout.held:  # the loss function itself gathers units and scatters their gradients: read off its trace
            each, once = traced_collectives(trace.program, self.platform)
            planned = each * run.num_microbatches + once + planned
        # XLA drops collectives along axes of one device.
        return [one for one in planned if math.prod(self._mesh.shape[axis] for axis in one.axes) > 1]

    def planned_groups(self, state: TrainState, batch: Any) -> list[tuple[str, int, tuple[int, ...]]]:
        """Lists ``(kind, bytes, devices of the first group)`` of what is planned, by their place in the mesh."""
        devices = np.arange(self._mesh.size).reshape(self._mesh.axis_sizes)

        def group(axes: tuple[str, ...]) -> tuple[int, ...]:
            place = tuple(slice(None) if axis in axes else 0 for axis in self._mesh.axis_names)
            return tuple(devices[place].reshape(-1).tolist())

        return [(one.kind, one.num_bytes, group(one.axes)) for one in self.planned_along(state, batch)]

    def planned_sync(self, state: TrainState) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives by which ranks agree on the model state at the end of a step."""
        sync = partial(steps.sync_model_state, ranks=self.layout.ranks, how=self.run.state_sync)
        with no_mesh():
            typed = abstract(state.model_state, self.shardings.model_state)
            program = jax.make_jaxpr(self._map(sync, (P(),), P()))(typed)
        return [(one.kind, one.num_bytes) for one in traced_collectives(program, self.platform, of_loss=True)[0]]

    def step_function(self, state: TrainState, batch: Any) -> StepFunction:
        """Gives the step before it is compiled: for ``jax.jit(function, **options).lower(*args)``."""
        step = partial(steps.train_step, self.run, self.trace(state, batch), self.plan(state, batch))
        return self._over_mesh(partial(steps.guarded_step, step, self.run.nonfinite), state, batch, is_step=True)

    def step(self, state: TrainState, batch: Any) -> Any:
        """Gives the compiled training step for these shapes."""
        check_batch(batch, self.layout.ranks.num_ranks, self.run.num_microbatches)
        key = signature(state, abstract(batch))
        if key not in self._programs:
            function, args, options = self.step_function(state, batch)
            with no_mesh():
                self._programs[key] = self._compile(function, args, **options)
        return self._programs[key]

    def evaluate(self, state: TrainState, batch: Any, measure: Callable[..., Any] | None = None) -> Any:
        """Compiles the evaluation for these shapes: of the loss, or a ``measured`` one, whose batch is its inputs."""
        check_batch(batch, self.layout.ranks.num_ranks, 1)
        on_rank = partial(steps.evaluate, self.run)
        if measure is not None:
            on_rank = partial(steps.measure, self.run, self.run.strategy.full(measure, self.layout))
        function, args, options = self._over_mesh(on_rank, state, batch)
        with no_mesh():
            return self._compile(function, args, **options)

    def _over_mesh(self, on_rank: Callable[..., Any], state: Any, batch: Any, *, is_step: bool = False) -> StepFunction:
        def placed(state: Any, batch: Any) -> Any:
            result = on_rank(self._placed(state), batch)
            return (self._placed(result[0]), result[1]) if is_step else result

        replicated = NamedSharding(self._mesh, P())
        options = {
            "in_shardings": (self.shardings, self.batch_sharding),
            "out_shardings": (self.shardings, replicated) if is_step else replicated,
            "donate_argnums": (0,) if is_step else (),  # the next state takes the place of the last one
            "compiler_options": self._options,
        }
        specs = self._specs, P(self._axis)
        function = self._map(
            placed if self.layout.ranks.other_axes else on_rank, specs, (self._specs, P()) if is_step else P()
        )
        return function, self._typed(state, batch), options

    def _typed(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Describes arrays with their shardings, which are in their types where axes of the mesh are explicit."""
        typed = jax.tree.map(lambda sharding, tree: abstract(tree, sharding), self.shardings, state)
        return typed, abstract(host_arrays(batch), self.batch_sharding)

    def _placed(self, state: TrainState) -> TrainState:
        """Keeps a state on the devices of a rank as its layout says: XLA would place it as the loss uses it."""
        leaves = (self.layout.params, self.layout.opt_state)

        def place(leaf: Leaf | None, array: jax.Array) -> jax.Array:
            if jnp.issubdtype(array.dtype, jax.dtypes.extended):
                return array
            with jax.named_scope(OTHER_AXES_SCOPE):
                return jax.lax.with_sharding_constraint(array, P() if leaf is None else leaf.shard_spec)

        params, opt_state = jax.tree.map(place, leaves, (state.params, state.opt_state))
        model_state = jax.tree.map(partial(place, None), state.model_state)
        return state._replace(params=params, opt_state=opt_state, model_state=model_state)

    def _map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        axes = {self._axis} if isinstance(self._axis, str) else {*self._axis}
        # check_vma would make users mark the carries of their own loops as varying.
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
        )
