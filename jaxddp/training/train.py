"""The trainer: one jitted, sharded training step around a loss function, an optax optimizer and a strategy.

``step.py`` computes, ``programs.py`` plans and compiles; here a state is made, batches are placed, programs run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..loss import partial_loss
from ..mesh import platform_of
from ..planning.buckets import BucketPlan
from ..strategy import Strategy
from ..targets.compile import TIMEOUT_S
from ..targets.job import Pending
from ..targets.meshes import target_of
from ..targets.program import TargetProgram
from ..tree import check_params
from .placement import from_first_process, place, place_by_rank, whole
from .programs import Programs
from .state_layout import StateLayout
from .step import RankStep
from .step import TrainState as TrainState
from .validation import as_arrays, check_alive, check_batch


class Trainer:
    """Data-parallel training of a loss function.

    Example:
        >>> import jax.numpy as jnp, optax, jaxddp
        >>> jaxddp.simulate_devices(4)
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(25), jaxddp.data_mesh(4))
        >>> state = trainer.init({"w": jnp.zeros((3, 1))})
        >>> batch = {"x": jnp.ones((8, 3)), "y": jnp.ones((8, 1))}
        >>> state, metrics = trainer.step(state, batch)
        >>> float(metrics["loss"])
        1.0
        >>> trainer.planned(state, batch)
        [('all-reduce', 12)]
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        strategy: Strategy,
        mesh: Mesh | AbstractMesh,
        *,
        num_microbatches: int = 1,
        trainable: Callable[[str], bool] | None = None,
        has_aux: bool = False,
        max_grad_norm: float | None = None,
        grad_dtype: Any = None,
    ) -> None:
        """Describes a training run; compiles nothing yet.

        Batch statistics (BatchNorm) are not supported: ``loss_fn`` cannot change state other than the parameters.

        Args:
            loss_fn: ``(params, batch)`` or ``(params, batch, key)`` to the mean loss over the examples it is given,
                or to ``Weighted``; with ``has_aux`` to ``(loss, aux)``. ``key`` differs by rank, step and micro-batch.
            optimizer: Any optax transformation; one that wants the loss's ``value`` (``reduce_on_plateau``) gets it.
            strategy: How gradients are communicated.
            mesh: One-dimensional, as ``data_mesh`` makes it, or ``targets.mesh``: then ``plan``, ``planned`` and
                ``compile`` work, with the state of ``abstract_state``, and nothing runs.
            num_microbatches: Parts into which each rank's examples are split, in order. Communication
                happens once, where a strategy does not say that every one communicates.
            trainable: Predicate on a parameter's dotted path. What it refuses gets no gradient, no optimizer state
                and no communication.
            has_aux: Whether ``loss_fn`` returns auxiliary values as well; they come back in ``metrics["aux"]``,
                averaged as the loss is.
            max_grad_norm: Clips the global norm of the averaged gradient to this value.
            grad_dtype: Dtype in which gradients are accumulated and summed over ranks; each parameter's own if None.

        Raises:
            ValueError: If the mesh is not one-dimensional or has no devices, or a number is out of range.
        """
        if len(mesh.axis_names) != 1:
            raise ValueError(f"mesh axes (={mesh.axis_names}) must be one: make the mesh with jaxddp.data_mesh")
        if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
            raise ValueError(f"num_microbatches (={num_microbatches!r}) must be a positive integer")
        if not all(kind == AxisType.Auto for kind in mesh.axis_types):
            raise ValueError(f"mesh axis types (={mesh.axis_types}) must be Auto: make the mesh with jaxddp.data_mesh")
        if grad_dtype is not None and not jnp.issubdtype(grad_dtype, jnp.floating):
            raise ValueError(f"grad_dtype (={grad_dtype!r}) must be a floating dtype or None")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm (={max_grad_norm!r}) must be positive or None")
        self.strategy = strategy
        self.mesh = mesh
        self.num_ranks = int(mesh.size)
        self.num_microbatches = num_microbatches
        self._rank_step = RankStep(
            partial_loss(loss_fn, has_aux),
            optax.with_extra_args_support(optimizer),
            strategy,
            axis=str(mesh.axis_names[0]),
            num_ranks=self.num_ranks,
            num_microbatches=num_microbatches,
            trainable=trainable,
            max_grad_norm=max_grad_norm,
            grad_dtype=grad_dtype,
        )
        self._target = target_of(mesh)
        self._platform = platform_of(mesh)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._by_rank = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._programs = Programs(self._rank_step, mesh)

    def init(self, params: Any, *, seed: int = 0) -> TrainState:
        """Puts a copy of the parameters, or its shard of them, on every rank and makes the optimizer state there.

        Several processes may call it with different parameters: those of process 0 count.

        Args:
            params: A tree of arrays, which stay the caller's.
            seed: Of the keys that ``loss_fn`` gets.

        Returns:
            The state of step 0.

        Raises:
            ValueError: If there are no arrays, a trainable one is not of a floating dtype, the optimizer is not
                element-wise where its state is sharded, or the mesh is a target's.
        """
        self._check_here("init", "abstract_state")
        check_params(params, self._rank_step.trainable)
        if jax.process_count() > 1:
            params, seed = from_first_process((params, seed))
        layout = self._programs.describe(params)
        params = place(params, layout.params, self.mesh)
        opt_state = self._programs.init_opt_state(layout, params)
        seed = int(seed)
        step, key = jax.jit(lambda: (jnp.zeros((), jnp.int32), jax.random.key(seed)), out_shardings=self._replicated)()
        return TrainState(step, params, opt_state, key, place_by_rank(layout.memory, self.mesh))

    def abstract_state(self, params: Any) -> TrainState:
        """Describes the state of step 0 without making it, for ``plan``, ``planned`` and ``compile``.

        Args:
            params: A tree of arrays or ``jax.ShapeDtypeStruct``.

        Returns:
            A state of ``jax.ShapeDtypeStruct``.

        Raises:
            ValueError: If there are no arrays, or a trainable one is not of a floating dtype.
        """
        check_params(params, self._rank_step.trainable)
        return self._programs.describe(params).held()

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one training step.

        Args:
            state: Donated: use the returned one from here on.
            batch: A tree of arrays whose dimension 0 counts examples, the same number in all: those of all ranks,
                or, where several processes train together, of this process's ranks.

        Returns:
            The next state, and metrics: ``"loss"``, the global mean before the update; ``"grad_norm"``, of the
            averaged gradient before clipping; ``"aux"`` with ``has_aux``.

        Raises:
            ValueError: If the batch cannot be split over ranks and micro-batches, the loss is not a scalar, or the mesh
                is a target's.
        """
        self._check_here("step", "compile")
        check_alive(state)
        state = as_arrays(state)
        batch = self._place(batch, self.num_microbatches)
        return self._finished(self._programs.step(state, batch)(state, batch))

    def evaluate(self, state: TrainState, batch: Any) -> jax.Array:
        """Gives the global mean loss of a batch, without gradients.

        Args:
            state: Kept as it is.
            batch: As for ``step``; micro-batches do not matter.

        Returns:
            A scalar.

        Raises:
            ValueError: If the batch cannot be split over ranks, or the mesh is a target's.
        """
        self._check_here("evaluate", "compile")
        check_alive(state)
        batch = self._place(batch, 1)
        return self._finished(self._programs.evaluate(state, batch)(state, batch))

    def params(self, state: TrainState) -> Any:
        """Gives a copy of the full parameters, as the tree that ``init`` was given; later steps leave it alone.

        It is whole on every device; ``checkpoint.host_state.host_params`` gives it on the host instead.
        """
        check_alive(state)
        return whole(state.params, self._programs.layout(state).params, self.mesh)

    def compile(self, state: TrainState, batch: Any) -> jax.stages.Compiled | TargetProgram:
        """Compiles the step for these shapes, or gives what ``step`` already runs for them.

        Args:
            state: As from ``init``; arrays or ``jax.ShapeDtypeStruct``.
            batch: The global batch; arrays or ``jax.ShapeDtypeStruct``.

        Returns:
            The very executable that ``step`` runs; on the mesh of a target what it would run there.

        Raises:
            ValueError: If the batch cannot be split over ranks and micro-batches, or a target's compiler is missing or
                refuses.
        """
        check_batch(batch, self.num_ranks, self.num_microbatches)
        return self._programs.step(state, batch)

    def plan(self, state: TrainState, batch: Any) -> BucketPlan:
        """Says which gradients travel together, in the order in which the traced backward finishes them.

        Gradients that are constant are left out, because XLA drops their reduction. On one rank nothing travels.

        Args:
            state: As from ``init``; arrays or ``jax.ShapeDtypeStruct``.
            batch: The global batch; arrays or ``jax.ShapeDtypeStruct``.

        Returns:
            The bucket plan of the step.
        """
        return self._programs.plan(state, batch)

    def planned(self, state: TrainState, batch: Any) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives that one step should hold, beside its metrics'."""
        return self._programs.planned(state, batch)

    def layout(self, state: TrainState) -> StateLayout:
        """Says which leaves of a state are shards, and of what; for stage 3 after ``init`` or ``abstract_state``."""
        return self._programs.layout(state)

    def start_compile(self, state: TrainState, batch: Any, *, timeout_s: float = TIMEOUT_S) -> Pending:
        """Starts what ``compile`` does on the mesh of a target, so that several programs compile at a time.

        Args:
            state: As from ``abstract_state``.
            batch: The global batch; arrays or ``jax.ShapeDtypeStruct``.
            timeout_s: Seconds that the compilation may take once it has started.

        Returns:
            What gives the program with ``result()``.

        Raises:
            ValueError: If the mesh is not a target's, or as ``compile``.
        """
        check_batch(batch, self.num_ranks, self.num_microbatches)
        return self._programs.start_step(state, batch, timeout_s)

    def start_compile_alone(self, state: TrainState, batch: Any) -> Pending:
        """Starts to compile the step without communication for the mesh's target: the measure of what overlap can do.

        Args:
            state: As from ``init`` or ``abstract_state``.
            batch: The global batch; arrays or ``jax.ShapeDtypeStruct``.

        Returns:
            What gives the program with ``result()``; every gradient is taken for equal on all ranks, and none is sent.

        Raises:
            ValueError: If the mesh's devices are no target's.
        """
        check_batch(batch, self.num_ranks, self.num_microbatches)
        return self._programs.start_step_alone(state, batch)

    def _check_here(self, method: str, instead: str) -> None:
        if self._target is not None:
            raise ValueError(f"{method} needs devices, and {self._target.spec!r} is not here: use {instead}")

    def _place(self, batch: Any, num_microbatches: int) -> Any:
        if jax.process_count() > 1:
            batch = jax.tree.map(
                lambda leaf: (
                    leaf
                    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
                    else jax.make_array_from_process_local_data(self._by_rank, np.asarray(leaf))
                ),
                batch,
            )
        check_batch(batch, self.num_ranks, num_microbatches)
        return jax.device_put(batch, self._by_rank)

    def _finished(self, result: Any) -> Any:
        # With more simulated devices than cores, steps that run ahead time out in XLA's rendezvous and abort.
        return jax.block_until_ready(result) if self._platform == "cpu" else result
