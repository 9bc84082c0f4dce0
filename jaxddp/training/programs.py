"""The programs of a trainer: what is traced, planned and compiled, once for each shape of state and batch.

A step on ranks becomes a program over a mesh: sharded by ``shard_map``, with a replicated state and a batch split by
rank, compiled with the options that keep its plan. The mesh may be of devices, then the program runs; or of a target
(``targets.py``), then it can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..compiled.schedule import read_schedule
from ..mesh import platform_of
from ..planning.buckets import BucketPlan
from ..simulation.tuning import time_gradients
from ..strategy import GradientTrace, Strategy, plan_trace, planned_collectives, trace_gradients
from ..targets.compile import TIMEOUT_S, compile_for_target, start_compile
from ..targets.job import Pending
from ..targets.meshes import mesh as target_mesh
from ..targets.meshes import target_like, target_of
from ..tree import named_leaves
from ..zero.stage3 import loss_on_shards
from ..zero.traced import traced_collectives
from .packing import shard_map
from .state_layout import StateLayout, state_layout
from .step import RankStep, TrainState
from .validation import abstract, signature
from .xla import compile_options


class Programs:
    """Plans and programs of one rank's step over one mesh, made when they are first asked for."""

    def __init__(self, rank_step: RankStep, mesh: Mesh | AbstractMesh) -> None:
        """Makes nothing yet.

        Args:
            rank_step: What each rank computes.
            mesh: One-dimensional, of devices or of a target.
        """
        self._rank_step, self._mesh = rank_step, mesh
        self._target = target_of(mesh)
        self._layouts: dict[Any, StateLayout] = {}  # by whole parameters
        self._of_shards: dict[Any, StateLayout] = {}  # at stage 3, by parameters as they are held
        self._plans: dict[Any, BucketPlan] = {}
        self._units: dict[Any, list[tuple[str, int]]] = {}
        self._programs: dict[Any, Any] = {}
        self._alone: dict[Any, Pending] = {}

    def describe(self, params: Any) -> StateLayout:
        """Lays out the state of a model, of whole parameters; at stage 3 its shards are known from here on.

        Raises:
            ValueError: If its optimizer cannot be sharded, or its shards cannot be told from those of another model.
        """
        key = signature(params)
        if key not in self._layouts:
            step = self._rank_step
            layout = state_layout(params, step.optimizer, step.strategy, step.num_ranks, step.trainable)
            if step.strategy.shards_params:
                _check_same(self._of_shards.setdefault(signature(layout.held().params), layout), layout)
            self._layouts[key] = layout
        return self._layouts[key]

    def layout(self, state: TrainState) -> StateLayout:
        """Gives the layout of a state.

        Raises:
            ValueError: If parameters are shards, and nothing has said of what.
        """
        if not self._rank_step.strategy.shards_params:
            return self.describe(state.params)
        layout = self._of_shards.get(signature(state.params))
        if layout is None:
            raise ValueError("the state holds shards of a model not seen yet: call init or abstract_state first")
        return layout

    def plan(self, state: TrainState, batch: Any) -> BucketPlan:
        """Gives the bucket plan of the step; on one rank nothing travels."""
        state, batch = abstract(state), abstract(batch)
        key = signature(state.params, batch)
        if key not in self._plans:
            trace = self._trace(state, batch)
            plan = plan_trace(self._tuned(state, batch, trace), trace)
            self._plans[key] = plan if self._rank_step.num_ranks > 1 else replace(plan, buckets=(), gathers=())
        return self._plans[key]

    def planned(self, state: TrainState, batch: Any) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives that one step should hold, beside its metrics'."""
        step, platform = self._on_rank(state), platform_of(self._mesh)
        plan = self.plan(state, batch)
        planned = planned_collectives(
            step.strategy, plan, step.num_ranks, platform, num_microbatches=step.num_microbatches
        )
        if not step.cuts:
            return planned
        # The gathers and scatters of units stand in the loss function, and no plan: they are read from its trace.
        key = signature(state.params, batch)
        if key not in self._units:
            traced = jax.make_jaxpr(self._first_grads(state, batch))(abstract(state), abstract(batch))
            self._units[key] = traced_collectives(traced, platform)
        return self._units[key] * step.num_microbatches + planned

    def init_opt_state(self, layout: StateLayout, params: Any) -> Any:
        """Makes the optimizer's state of step 0, each rank its own part of it."""
        specs = layout.specs(self._rank_step.axis)
        init = shard_map(self._rank_step.init, mesh=self._mesh, in_specs=(specs.params,), out_specs=specs.opt_state)
        return jax.jit(init, out_shardings=jax.tree.map(partial(NamedSharding, self._mesh), specs.opt_state))(params)

    def step(self, state: TrainState, batch: Any) -> Any:
        """Gives the compiled training step for these shapes."""

        def make() -> Any:
            return self._step(self._mesh, self.plan(state, batch), state, batch)

        return self._compiled("step", make, state, batch)

    def evaluate(self, state: TrainState, batch: Any) -> Any:
        """Gives the compiled evaluation for these shapes."""

        def make() -> Any:
            return self._over(self._mesh, self._on_rank(state).evaluate, (), state, batch)

        return self._compiled("evaluate", make, state, batch)

    def start_step(self, state: TrainState, batch: Any, timeout_s: float = TIMEOUT_S) -> Pending:
        """Starts to compile the step for the mesh's target; it may take ``timeout_s``.

        Raises:
            ValueError: If the mesh is not a target's.
        """
        if self._target is None:
            raise ValueError(f"mesh (={self._mesh}) must be a target's to compile apart: use compile")
        function, args, options = self._step(self._mesh, self.plan(state, batch), state, batch)
        return start_compile(self._target, function, args, timeout_s=timeout_s, **options)

    def start_step_alone(self, state: TrainState, batch: Any) -> Pending:
        """Starts to compile the step without communication, for the mesh's target or the one that its devices are.

        Every gradient is taken for equal on all ranks, and none is packed or sent. It is the same for all strategies:
        that of whole parameters and a whole optimizer state.

        Raises:
            ValueError: If the mesh's devices are no target's.
        """
        target = target_like(self._mesh)
        key = signature(state, batch)
        if key in self._alone:
            return self._alone[key]
        if self._rank_step.strategy.shards_optimizer_state:
            whole = Programs(
                replace(self._rank_step, strategy=Strategy("whole", lambda tensors: BucketPlan(()))), self._mesh
            )
            self._alone[key] = whole.start_step_alone(whole.describe(self.layout(state).whole()).held(), batch)
            return self._alone[key]
        trace = self._trace(abstract(state), abstract(batch))
        nothing = BucketPlan((), constants=tuple(tensor.name for tensor in (*trace.tensors, *trace.constants)))
        function, args, options = self._step(target_mesh(target.spec, axis=self._rank_step.axis), nothing, state, batch)
        self._alone[key] = start_compile(target, function, args, **options)
        return self._alone[key]

    def _on_rank(self, state: TrainState) -> RankStep:
        """What each rank computes of this state, whose parameters may be shards."""
        step = self._rank_step
        if not step.strategy.shards_params:
            return step
        layout, strategy = self.layout(state), step.strategy
        cuts = {name: leaf.cut for name, leaf in named_leaves(layout.params).items() if leaf.cut is not None}
        sends = strategy.compression.sends and step.num_ranks > 1
        reduced = strategy.precision.reduce_dtype or step.grad_dtype
        loss = loss_on_shards(
            step.loss, layout.whole(), cuts, step.axis, strategy.precision._replace(reduce_dtype=reduced),
            trainable=step.trainable, sends=sends,
        )  # fmt: skip
        return replace(step, loss=loss, cuts=cuts)

    def _first_grads(self, state: TrainState, batch: Any) -> Callable[..., Any]:
        first_grads = self._on_rank(state).first_grads
        outs = (PartitionSpec(), PartitionSpec(self._rank_step.axis))
        # Never packed: it is traced to see when each gradient is ready, and a pack is not ready before all of it is.
        return jax.shard_map(first_grads, mesh=self._mesh, in_specs=self._specs(state), out_specs=outs, check_vma=False)

    def _trace(self, state: TrainState, batch: Any) -> GradientTrace:
        on_ranks = self._first_grads(state, batch)
        return trace_gradients(lambda *args: on_ranks(*args)[0], state, batch)

    def _tuned(self, state: TrainState, batch: Any, trace: GradientTrace) -> Strategy:
        """The strategy, its open choices made for the mesh at hand from the step compiled without communication."""
        strategy, num_ranks = self._rank_step.strategy, self._rank_step.num_ranks
        if strategy.tune is None:
            return strategy
        schedule = read_schedule(self.start_step_alone(state, batch).result())
        chip = target_like(self._mesh).chip
        return strategy.tune(time_gradients(schedule, trace.tensors, trace.flops_before, chip, num_ranks))

    def _compiled(self, kind: str, make: Callable[[], Any], state: TrainState, batch: Any) -> Any:
        key = (kind, signature(state, batch))
        if key not in self._programs:
            function, args, options = make()
            if self._target is not None:
                self._programs[key] = compile_for_target(self._target, function, args, **options)
            else:
                self._programs[key] = jax.jit(function, **options).lower(*args).compile()
        return self._programs[key]

    def _step(self, mesh: Mesh | AbstractMesh, plan: BucketPlan, state: TrainState, batch: Any) -> Any:
        return self._over(mesh, partial(self._on_rank(state).train, plan), (0,), state, batch)

    def _over(
        self, mesh: Mesh | AbstractMesh, on_rank: Callable[..., Any], donated: tuple[int, ...], state: Any, batch: Any
    ) -> tuple[Callable[..., Any], tuple[Any, Any], dict[str, Any]]:
        """A function on ranks as one over a mesh, its arguments, and the options to compile it with."""
        ins, metrics = self._specs(state), PartitionSpec()
        outs = (ins[0], metrics) if donated else metrics
        in_shardings, out_shardings = jax.tree.map(partial(NamedSharding, mesh), (ins, outs))
        options = {
            "in_shardings": in_shardings,
            "out_shardings": out_shardings,
            "donate_argnums": donated,
            "compiler_options": compile_options(self._rank_step.strategy, platform_of(mesh)),
        }
        function = shard_map(on_rank, mesh=mesh, in_specs=ins, out_specs=outs)
        return function, (abstract(state), abstract(batch)), options

    def _specs(self, state: TrainState) -> tuple[TrainState, PartitionSpec]:
        """How a state and a batch lie over the mesh."""
        return self.layout(state).specs(self._rank_step.axis), PartitionSpec(self._rank_step.axis)


def _check_same(known: StateLayout, layout: StateLayout) -> None:
    """Refuses a model whose shards are shaped as those of one that is known, and are to be put together otherwise."""
    for (name, theirs), ours in zip(named_leaves(known.params).items(), jax.tree.leaves(layout.params), strict=True):
        if ours != theirs:
            raise ValueError(
                f"parameter {name!r} (={ours.shape}) cannot be told by its shards from that of another model of this "
                f"trainer (={theirs.shape}): make a Trainer for each"
            )
