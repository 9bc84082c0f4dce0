"""The programs of a trainer: traced, planned and compiled once for each shape of state and batch.

A rank's step becomes a program over a mesh by ``shard_map``: the batch is split by rank, the state lies as its layout
says, and the compile options keep the plan. A mesh of devices is compiled for here; whoever makes a mesh without
devices registers what compiles for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..communication.axes import shard_axis
from ..communication.buckets import BucketPlan, TensorSpec
from ..communication.sharding import Blocks, Cut
from ..mesh import platform_of
from ..metrics import Measure
from ..strategy import (
    GradientTrace,
    Planned,
    describe_results,
    plan_trace,
    planned_along,
    planned_exchange,
    trace_gradients,
)
from ..tree import named_leaves, path_name
from ..zero.stage3 import loss_on_shards
from ..zero.traced import TracedCollectives, traced_collectives
from .packing import shard_map
from .state_layout import Leaf, StateLayout, blocks_of, state_layout
from .step import RankStep, TrainState
from .validation import abstract, signature
from .xla import compile_options

Compile = Callable[..., Any]
"""``(function, args, **options)`` to a compiled program; the options are those of ``jax.jit``."""

StepFunction = tuple[Callable[..., Any], tuple[Any, Any], dict[str, Any]]
"""A function over a mesh, its abstract arguments, and the options of ``jax.jit`` to compile it with."""

_COMPILERS: dict[AbstractDevice, Compile] = {}


def register_compiler(device: AbstractDevice, compiler: Compile) -> None:
    """Sets how to compile for meshes of a device that is not there.

    Args:
        device: ``AbstractMesh.abstract_device``.
        compiler: Compiles a function for it.
    """
    _COMPILERS[device] = compiler


class _Model(NamedTuple):
    """One model's parameters under the trainer's strategy."""

    layout: StateLayout
    rank_step: RankStep  # its loss takes parameters as the state holds them
    specs: tuple[TrainState, PartitionSpec]  # of state and batch
    shardings: tuple[TrainState, NamedSharding]  # the same over the whole mesh


class Programs:
    """Plans and programs of one rank's step over one mesh, made when they are first asked for.

    Attributes:
        platform: Of the mesh.
    """

    def __init__(
        self, rank_step: RankStep, mesh: Mesh | AbstractMesh, param_specs: Any = None, *, start_early: bool = True
    ) -> None:
        """Makes nothing yet.

        Args:
            rank_step: What each rank computes.
            mesh: Of the ranks.
            param_specs: A ``PartitionSpec`` for each parameter along other axes of the mesh, or a prefix of that tree.
            start_early: As for ``compile_options``.

        Raises:
            ValueError: If the mesh has no devices and nothing is registered that compiles for it.
        """
        compiler = _compile_here if isinstance(mesh, Mesh) else _COMPILERS.get(mesh.abstract_device)
        if compiler is None:
            raise ValueError(f"mesh (={mesh}) has no devices: make it with jaxddp.data_mesh or jaxddp.targets.mesh")
        self.platform = platform_of(mesh)
        self._rank_step = replace(rank_step, as_bits=self.platform == "cpu")
        self._mesh, self._param_specs, self._compile = mesh, param_specs, compiler
        self._compiler_options = compile_options(rank_step.strategy, self.platform, start_early=start_early)
        self._layouts: dict[Any, StateLayout] = {}  # by full parameters
        self._models: dict[Any, _Model] = {}  # by parameters as a state holds them
        self._plans: dict[Any, BucketPlan] = {}
        self._results: dict[Any, str] = {}
        self._units: dict[Any, TracedCollectives] = {}
        self._programs: dict[Any, Any] = {}

    def copy(self) -> Programs:
        """Makes another that knows what this one does; what either learns from here on is its own."""
        new = copy.copy(self)
        new.__dict__.update({name: dict(value) for name, value in self.__dict__.items() if isinstance(value, dict)})
        return new

    def describe(self, params: Any) -> StateLayout:
        """Lays out the state of a model; states that hold shards of these parameters are known from here on.

        Args:
            params: Full parameters; arrays or ``jax.ShapeDtypeStruct``.

        Raises:
            ValueError: If the optimizer cannot be sharded, or if shards of another model have the same shapes.
        """
        key = signature(params)
        if key not in self._layouts:
            step = self._rank_step
            num_ranks = step.num_shards if step.strategy.shards_optimizer_state else step.num_ranks
            blocks = blocks_of(params, self._param_specs, self._mesh, step.other_axes)
            layout = state_layout(
                params, step.optimizer, step.strategy, num_ranks, step.trainable, step.compute_dtype, blocks,
                has_ema=step.ema_decay is not None,
            )  # fmt: skip
            specs = layout.specs(step.axis), PartitionSpec(step.axis)
            shardings = layout.shardings(self._mesh, step.axis), NamedSharding(self._mesh, specs[1])
            model = _Model(layout, self._on_rank(layout), specs, shardings)
            known = self._models.setdefault(signature(layout.held().params), model)
            _check_same(known.layout, layout)
            self._layouts[key] = layout
        return self._layouts[key]

    def layout(self, state: TrainState) -> StateLayout:
        """Gives the layout of a state.

        Raises:
            ValueError: If the parameters are shards of a model that was not described.
        """
        return self._model(state).layout

    def trace(self, state: TrainState, batch: Any) -> GradientTrace:
        """Traces one rank's backward pass, to see in which order the gradients become ready.

        Tensors have the shapes of the blocks on a device, if other axes of the mesh split them.
        """
        model = self._model(state)
        _check_opt_state(state, model.layout)
        # A state whose parameters were replaced has no copies; one of another trainer may have some that it should not.
        state = state._replace(copies=model.layout.held().copies if model.layout.copies else ())
        # JAX's own shard_map: in a pack of this package's, no gradient is ready before the whole pack is.
        first_grads = jax.shard_map(
            model.rank_step.first_grads,
            mesh=self._mesh,
            in_specs=model.specs,
            out_specs=PartitionSpec(),
            axis_names={*self._mesh.axis_names} - {*self._rank_step.other_axes},
            check_vma=False,
        )
        trace = trace_gradients(first_grads, state, batch, has_aux=True, reduced=model.rank_step.cuts)
        blocks = model.rank_step.blocks
        if not blocks:
            return trace

        def block(tensor: TensorSpec) -> TensorSpec:
            of = blocks.get(tensor.name)
            return tensor._replace(shape=of.shape_of(tensor.shape)) if of else tensor

        tensors, constants = (tuple(map(block, some)) for some in (trace.tensors, trace.constants))
        return trace._replace(tensors=tensors, constants=constants)

    def plan(self, state: TrainState, batch: Any) -> BucketPlan:
        """Gives the bucket plan of the step; on one rank nothing is communicated."""
        state, batch = abstract((state, batch))
        key = signature(state.params, state.model_state, batch)
        if key not in self._plans:
            trace, used = self.trace(state, batch), named_leaves(self._model(state).layout.used())
            plan = plan_trace(self._rank_step.strategy, trace, {name: str(leaf.dtype) for name, leaf in used.items()})
            self._results[key] = describe_results(trace) if jax.process_count() > 1 else ""
            self._plans[key] = plan if self._rank_step.num_ranks > 1 else replace(plan, buckets=(), gathers=())
        return self._plans[key]

    def describe_results(self, state: TrainState, batch: Any) -> str:
        """Describes what processes must agree on in the step beside its plan."""
        state, batch = abstract((state, batch))
        self.plan(state, batch)
        return self._results[signature(state.params, state.model_state, batch)]

    def planned(self, state: TrainState, batch: Any) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives that one step should have, without those of its metrics."""
        return [(one.kind, one.num_bytes) for one in self.planned_along(state, batch)]

    def planned_along(self, state: TrainState, batch: Any) -> list[Planned]:
        """Lists the same with the mesh axes along which they are."""
        model = self._model(state)
        step = model.rank_step
        planned = planned_along(
            step.axis, step.strategy, self.plan(state, batch), step.num_ranks, step.num_shards, self.platform,
            step.num_microbatches,
        )  # fmt: skip
        if step.leaves is not None and planned:
            num_swaps = 2 if step.compute_dtype is None else 3  # of gradients, and of parameters there and back
            along = (shard_axis(step.axis),)
            for swapped in step.leaves.swapped:
                swap = planned_exchange("all-to-all", *swapped, step.num_shards, self.platform)
                planned += num_swaps * [Planned(*swap, along)]
        if not step.cuts:
            return self._of_several(planned)
        # The loss function itself gathers units and scatters their gradients: read from its trace.
        key = signature(state.params, state.model_state, batch)
        if key not in self._units:
            trace = self.trace(*abstract((state, batch)))
            self._units[key] = traced_collectives(trace.program, self.platform)
        units = self._units[key]
        return self._of_several(units.each * step.num_microbatches + units.once + planned)

    def planned_loss(self, state: TrainState, batch: Any) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives that the loss function itself calls in a step."""
        trace = self.trace(*abstract((state, batch)))
        found = traced_collectives(trace.program, self.platform, of_loss=True)
        own = self._of_several(found.each * self._rank_step.num_microbatches + found.once)
        return [(one.kind, one.num_bytes) for one in own]

    def _of_several(self, planned: list[Planned]) -> list[Planned]:
        """Leaves out collectives along axes of one device, which XLA drops."""
        return [one for one in planned if math.prod(self._mesh.shape[axis] for axis in one.axes) > 1]

    def init_opt_state(self, layout: StateLayout, params: Any) -> Any:
        """Makes the optimizer's state of step 0; each rank makes its own part."""
        axis = self._rank_step.axis
        specs, shardings = layout.specs(axis), layout.shardings(self._mesh, axis)
        init = shard_map(
            partial(self._on_rank(layout).init, layout.whole()),
            mesh=self._mesh,
            in_specs=(specs.params,),
            out_specs=specs.opt_state,
            axis=axis,
        )
        return jax.jit(init, out_shardings=shardings.opt_state)(params)

    def make_copies(self, layout: StateLayout, params: Any) -> Any:
        """Casts the parameters of a state to the copies that the loss takes; gives () if it takes none."""
        if not layout.copies:
            return ()
        places = named_leaves(layout.params)

        def cast(params: dict[str, Any]) -> Any:
            def copy(path: Any, leaf: Leaf) -> jax.Array:
                array, place = params[path_name(path)].astype(leaf.dtype), places[path_name(path)]
                return place.from_global(array) if place.cut else jnp.copy(array)

            return jax.tree_util.tree_map_with_path(copy, layout.copies)

        shardings = layout.shardings(self._mesh, self._rank_step.axis).copies
        return jax.jit(cast, out_shardings=shardings)(named_leaves(params))

    def step_function(self, state: TrainState, batch: Any, plan: BucketPlan | None = None) -> StepFunction:
        """Gives the training step as a function to compile, with the given plan or its own."""
        _check_opt_state(state, self._model(state).layout)  # again: a plan is kept for any with these parameters
        if plan is None or plan.buckets:  # a plan without buckets is meant to send nothing
            own = self.plan(state, batch)
            plan = own if plan is None else plan
            if unsent := sorted(set(plan.constants) - set(own.constants)):
                raise ValueError(f"plan takes the gradient of {unsent[0]!r} as constant, and it is not: plan this step")
        model = self._model(state)
        return self._over_mesh(partial(model.rank_step.train, plan), model, state, batch, donates_state=True)

    def step(self, state: TrainState, batch: Any) -> Any:
        """Gives the compiled training step for these shapes."""
        key = "step", signature(state, batch)
        if key not in self._programs:
            function, args, options = self.step_function(state, batch)
            self._programs[key] = self._compile(function, args, **options)
        return self._programs[key]

    def evaluate(self, state: TrainState, batch: Any, measure: Measure | None = None) -> Any:
        """Gives the compiled evaluation for these shapes: of the loss, or of a measure, whose batch is its inputs."""
        key = "evaluate", measure, signature(state, batch)
        if key not in self._programs:
            model = self._model(state)
            _check_opt_state(state, model.layout)
            on_rank = model.rank_step.evaluate
            if measure is not None:
                on_rank = partial(
                    model.rank_step.measure, self._of_held(measure, model.layout, dict(model.rank_step.cuts))
                )
            function, args, options = self._over_mesh(on_rank, model, state, batch)
            self._programs[key] = self._compile(function, args, **options)
        return self._programs[key]

    def _model(self, state: TrainState) -> _Model:
        key = signature(state.params)
        if key not in self._models:
            step = self._rank_step
            if step.strategy.shards_params or (step.compute_dtype is not None and step.strategy.shards_optimizer_state):
                raise ValueError("the state holds shards of a model not seen yet: call init or abstract_state first")
            self.describe(state.params)
        return self._models[key]

    def _on_rank(self, layout: StateLayout) -> RankStep:
        """The rank's step whose loss takes parameters as the state holds them."""
        step, leaves = self._rank_step, named_leaves(layout.params)
        grad_dtypes = {name: step.grad_dtype or leaf.dtype for name, leaf in leaves.items()}
        cuts = {name: leaf.cut for name, leaf in leaves.items() if leaf.cut is not None and step.strategy.shards_params}
        loss, blocks = self._of_held(step.loss, layout, cuts), _blocks(layout)
        return replace(step, loss=loss, cuts=cuts, grad_dtypes=grad_dtypes, leaves=layout.leaves, blocks=blocks)

    def _of_held(self, function: Callable[..., Any], layout: StateLayout, cuts: dict[str, Cut]) -> Callable[..., Any]:
        """Turns a function of full parameters into one of parameters as the state holds them."""
        step, strategy = self._rank_step, self._rank_step.strategy
        if not strategy.shards_params:
            return function
        precision = strategy.precision._replace(reduce_dtype=strategy.precision.reduce_dtype or step.grad_dtype)
        sends = strategy.compression.sends and step.num_ranks > 1
        return loss_on_shards(
            function, layout.whole(), cuts, step.axis, precision, trainable=step.trainable, sends=sends,
            as_bits=step.as_bits, blocks=_blocks(layout), other_axes=step.other_axes,
        )  # fmt: skip

    def _over_mesh(
        self, on_rank: Callable[..., Any], model: _Model, state: Any, batch: Any, *, donates_state: bool = False
    ) -> StepFunction:
        whole: Any = PartitionSpec()
        outs, replicated = (model.specs[0], whole) if donates_state else whole, NamedSharding(self._mesh, whole)
        options = {
            "in_shardings": model.shardings,
            "out_shardings": (model.shardings[0], replicated) if donates_state else replicated,
            "donate_argnums": (0,) if donates_state else (),
            "compiler_options": self._compiler_options,
        }
        placed = partial(model.rank_step.placed, shardings=model.shardings[0])

        def on_devices(state: Any, batch: Any) -> Any:
            result = on_rank(placed(state), batch)
            return (placed(result[0]), result[1]) if donates_state else result

        step = self._rank_step
        function = shard_map(
            on_devices if step.other_axes else on_rank, mesh=self._mesh, in_specs=model.specs, out_specs=outs,
            axis=step.axis,
        )  # fmt: skip
        return function, abstract((state, batch)), options


def _blocks(layout: StateLayout) -> dict[str, Blocks]:
    return {name: leaf.blocks for name, leaf in named_leaves(layout.params).items() if leaf.blocks is not None}


def _compile_here(function: Callable[..., Any], args: tuple[Any, Any], **options: Any) -> jax.stages.Compiled:
    return jax.jit(function, **options).lower(*args).compile()


def _check_opt_state(state: TrainState, layout: StateLayout) -> None:
    if len({jax.tree.structure(opt_state) for opt_state in (state.opt_state, layout.opt_state)}) > 1:
        raise ValueError(
            "state must hold what this trainer's optimizer keeps of the state's parameters, and holds the state of"
            " another optimizer or of other parameters: make it with init"
        )


def _check_same(known: StateLayout, layout: StateLayout) -> None:
    """Refuses a model whose shards have the shapes of a known model's, but are joined to other shapes."""
    for (name, theirs), ours in zip(named_leaves(known.params).items(), jax.tree.leaves(layout.params), strict=True):
        if ours != theirs:
            raise ValueError(
                f"parameter {name!r} (={ours.shape}) cannot be told by its shards from that of another model of this "
                f"trainer (={theirs.shape}): make a Trainer for each"
            )
