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

from .buckets import BucketPlan
from .inputs import abstract, signature
from .mesh import platform_of
from .schedule import read_schedule
from .step import RankStep, TrainState
from .strategy import GradientTrace, Strategy, planned_collectives, trace_gradients
from .target_compile import compile_for_target, start_compile
from .target_job import Pending
from .targets import mesh as target_mesh
from .targets import target_like, target_of
from .tuning import time_gradients
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
        self._plans: dict[Any, BucketPlan] = {}
        self._programs: dict[Any, Any] = {}
        self._alone: dict[Any, Pending] = {}

    def plan(self, state: TrainState, batch: Any) -> BucketPlan:
        """Gives the bucket plan of the step; on one rank nothing travels."""
        state, batch = abstract(state), abstract(batch)
        key = signature(state.params, batch)
        if key not in self._plans:
            trace = self._trace(state, batch)
            strategy = self._tuned(state, batch, trace)
            plan = replace(strategy.plan(trace.tensors), constants=trace.constants)
            self._plans[key] = plan if self._rank_step.num_ranks > 1 else replace(plan, buckets=())
        return self._plans[key]

    def planned(self, state: TrainState, batch: Any) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives that one step should hold, beside its metrics'."""
        plan, num_ranks = self.plan(state, batch), self._rank_step.num_ranks
        return planned_collectives(self._rank_step.strategy, plan, num_ranks, platform_of(self._mesh))

    def step(self, state: TrainState, batch: Any) -> Any:
        """Gives the compiled training step for these shapes."""

        def make() -> Any:
            return self._step(self._mesh, self.plan(state, batch), state, batch)

        return self._compiled("step", make, state, batch)

    def evaluate(self, state: TrainState, batch: Any) -> Any:
        """Gives the compiled evaluation for these shapes."""
        evaluate = self._rank_step.evaluate
        return self._compiled("evaluate", lambda: self._over(self._mesh, evaluate, (), state, batch), state, batch)

    def start_step(self, state: TrainState, batch: Any) -> Pending:
        """Starts to compile the step for the mesh's target.

        Raises:
            ValueError: If the mesh is not a target's.
        """
        if self._target is None:
            raise ValueError(f"mesh (={self._mesh}) must be a target's to compile apart: use compile")
        function, args, options = self._step(self._mesh, self.plan(state, batch), state, batch)
        return start_compile(self._target, function, args, **options)

    def start_step_alone(self, state: TrainState, batch: Any) -> Pending:
        """Starts to compile the step without communication, for the mesh's target or the one that its devices are.

        Every gradient is taken for equal on all ranks, and none is packed or sent.

        Raises:
            ValueError: If the mesh's devices are no target's.
        """
        target = target_like(self._mesh)
        key = signature(state, batch)
        if key in self._alone:
            return self._alone[key]
        trace = self._trace(abstract(state), abstract(batch))
        nothing = BucketPlan((), constants=(*(tensor.name for tensor in trace.tensors), *trace.constants))
        function, args, options = self._step(target_mesh(target.spec, axis=self._rank_step.axis), nothing, state, batch)
        self._alone[key] = start_compile(target, function, args, **options)
        return self._alone[key]

    def _trace(self, state: TrainState, batch: Any) -> GradientTrace:
        return trace_gradients(self._sharded(self._rank_step.first_grads, self._mesh), state, batch)

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
        return self._over(mesh, partial(self._rank_step.train, plan), (0,), state, batch)

    def _over(
        self, mesh: Mesh | AbstractMesh, on_rank: Callable[..., Any], donated: tuple[int, ...], state: Any, batch: Any
    ) -> tuple[Callable[..., Any], tuple[Any, Any], dict[str, Any]]:
        """A function on ranks as one over a mesh, its arguments, and the options to compile it with."""
        replicated = NamedSharding(mesh, PartitionSpec())
        options = {
            "in_shardings": (replicated, NamedSharding(mesh, PartitionSpec(mesh.axis_names))),
            "out_shardings": replicated,
            "donate_argnums": donated,
            "compiler_options": compile_options(self._rank_step.strategy, platform_of(mesh)),
        }
        return self._sharded(on_rank, mesh), (abstract(state), abstract(batch)), options

    def _sharded(self, function: Callable[..., Any], mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
        # check_vma would make users mark the carries of their own loops as varying.
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(mesh.axis_names)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
