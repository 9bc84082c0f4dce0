"""The trainer: one jitted, sharded training step around a loss function, an optax optimizer and a strategy.

What a step computes is in ``step.py``. Here it is traced once to plan the communication, compiled once for each shape
of batch with the options that keep the plan, and fed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .buckets import BucketPlan
from .loss import partial_loss
from .step import RankStep
from .step import TrainState as TrainState
from .strategy import Strategy, plan_gradients, planned_collectives
from .tree import check_params, named_leaves
from .xla import compile_options


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
        mesh: Mesh,
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
            mesh: One-dimensional, as ``data_mesh`` makes it.
            num_microbatches: Parts into which each rank's examples are split, in order; communication happens once.
            trainable: Predicate on a parameter's dotted path. What it refuses gets no gradient, no optimizer state
                and no communication.
            has_aux: Whether ``loss_fn`` returns auxiliary values as well; they come back in ``metrics["aux"]``,
                averaged as the loss is.
            max_grad_norm: Clips the global norm of the averaged gradient to this value.
            grad_dtype: Dtype in which gradients are accumulated and summed over ranks; each parameter's own if None.

        Raises:
            ValueError: If the mesh is not one-dimensional, or a number is out of range.
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
        self._platform = mesh.devices.flat[0].platform
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._by_rank = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._plans: dict[Any, BucketPlan] = {}
        self._programs: dict[Any, Any] = {}

    def init(self, params: Any, *, seed: int = 0) -> TrainState:
        """Puts a copy of the parameters on every rank and makes the optimizer state there.

        Several processes may call it with different parameters: those of process 0 count.

        Args:
            params: A tree of arrays, which stay the caller's.
            seed: Of the keys that ``loss_fn`` gets.

        Returns:
            The state of step 0.

        Raises:
            ValueError: If there are no arrays, or a trainable one is not of a floating dtype.
        """
        check_params(params, self._rank_step.trainable)
        key = jax.random.key(seed)
        if jax.process_count() > 1:
            params, seed = multihost_utils.broadcast_one_to_all((params, seed))
            params = jax.tree.map(self._replicate_across_processes, params)
            key = jax.jit(lambda: jax.random.key(int(seed)), out_shardings=self._replicated)()
        else:
            # Copied first: device_put may hand on the caller's own buffer, which the first step would then donate.
            params = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
            params, key = jax.device_put((params, key), self._replicated)
        opt_state = jax.jit(self._rank_step.init, out_shardings=self._replicated)(params)
        step = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=self._replicated)()
        return TrainState(step, params, opt_state, key)

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
            ValueError: If the batch cannot be split over ranks and micro-batches, or the loss is not a scalar.
        """
        _check_alive(state)
        batch = self._place(batch)
        return self._finished(self._program("step", state, batch)(state, batch))

    def evaluate(self, state: TrainState, batch: Any) -> jax.Array:
        """Gives the global mean loss of a batch, without gradients.

        Args:
            state: Kept as it is.
            batch: As for ``step``; micro-batches do not matter.

        Returns:
            A scalar.

        Raises:
            ValueError: If the batch cannot be split over ranks.
        """
        _check_alive(state)
        batch = self._place(batch, num_parts=self.num_ranks)
        return self._finished(self._program("evaluate", state, batch)(state, batch))

    def params(self, state: TrainState) -> Any:
        """Gives a copy of the full parameters, as the tree that ``init`` was given; later steps leave it alone."""
        _check_alive(state)
        return jax.tree.map(jnp.copy, state.params)

    def compile(self, state: TrainState, batch: Any) -> jax.stages.Compiled:
        """Compiles the step for these shapes, or gives what ``step`` already runs for them.

        Args:
            state: As from ``init``; arrays or ``jax.ShapeDtypeStruct``.
            batch: The global batch; arrays or ``jax.ShapeDtypeStruct``.

        Returns:
            The very executable that ``step`` runs.

        Raises:
            ValueError: If the batch cannot be split over ranks and micro-batches.
        """
        self._check_batch(batch, self.num_ranks * self.num_microbatches)
        return self._program("step", state, _abstract(batch))

    def plan(self, state: TrainState, batch: Any) -> BucketPlan:
        """Says which gradients travel together, in the order in which the traced backward finishes them.

        Gradients that are constant are left out, because XLA drops their reduction. On one rank nothing travels.

        Args:
            state: As from ``init``; arrays or ``jax.ShapeDtypeStruct``.
            batch: The global batch; arrays or ``jax.ShapeDtypeStruct``.

        Returns:
            The bucket plan of the step.
        """
        batch = _abstract(batch)
        key = _signature(state.params, batch)
        if key not in self._plans:
            grads_on_rank = self._sharded(self._rank_step.first_grads)
            plan = plan_gradients(self.strategy, grads_on_rank, _abstract(state), batch)
            self._plans[key] = plan if self.num_ranks > 1 else replace(plan, buckets=())
        return self._plans[key]

    def planned(self, state: TrainState, batch: Any) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives that one step should hold, beside its metrics'."""
        return planned_collectives(self.strategy, self.plan(state, batch), self.num_ranks, self._platform)

    def _program(self, kind: str, state: TrainState, batch: Any) -> Any:
        key = (kind, _signature(state, batch))
        if key not in self._programs:
            if kind == "step":
                plan = self.plan(state, batch)
                function = self._sharded(partial(self._rank_step.train, plan))
                donated: tuple[int, ...] = (0,)
            else:
                function, donated = self._sharded(self._rank_step.evaluate), ()
            jitted = jax.jit(
                function,
                in_shardings=(self._replicated, self._by_rank),
                out_shardings=self._replicated,
                donate_argnums=donated,
                compiler_options=compile_options(self.strategy, self._platform),
            )
            self._programs[key] = jitted.lower(_abstract(state), _abstract(batch)).compile()
        return self._programs[key]

    def _sharded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # check_vma would make users mark the carries of their own loops as varying.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(self.mesh.axis_names)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )

    def _check_batch(self, batch: Any, num_parts: int) -> None:
        leaves = named_leaves(batch)
        if not leaves:
            raise ValueError(f"batch (={batch!r}) must hold at least one array")
        for name, leaf in leaves.items():
            if not hasattr(leaf, "shape") or leaf.ndim == 0:
                raise ValueError(f"batch leaf {name!r} (={leaf!r}) must be an array whose dimension 0 counts examples")
        lengths = {name: leaf.shape[0] for name, leaf in leaves.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"batch leaves must agree in length, they have {lengths}")
        length = next(iter(lengths.values()))
        if length % num_parts or length == 0:
            raise ValueError(
                f"batch (={length} examples) must be divisible by num_ranks x num_microbatches "
                f"(={self.num_ranks} x {num_parts // self.num_ranks})"
            )

    def _place(self, batch: Any, num_parts: int | None = None) -> Any:
        if jax.process_count() > 1:
            batch = jax.tree.map(
                lambda leaf: (
                    leaf
                    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
                    else jax.make_array_from_process_local_data(self._by_rank, np.asarray(leaf))
                ),
                batch,
            )
        self._check_batch(batch, num_parts or self.num_ranks * self.num_microbatches)
        return jax.device_put(batch, self._by_rank)

    def _replicate_across_processes(self, value: Any) -> jax.Array:
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, self._replicated, lambda index: value[index])

    def _finished(self, result: Any) -> Any:
        # With more simulated devices than cores, steps that run ahead time out in XLA's rendezvous and abort.
        return jax.block_until_ready(result) if self._platform == "cpu" else result


def _check_alive(state: TrainState) -> None:
    # On jax 0.10 running a program on donated arrays ends the process.
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise ValueError(f"state (={type(state).__name__}) was donated to an earlier step: use the one it returned")


def _abstract(tree: Any) -> Any:
    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if is_key else jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(struct, tree)


def _signature(*trees: Any) -> Any:
    leaves, structure = jax.tree.flatten(trees)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
