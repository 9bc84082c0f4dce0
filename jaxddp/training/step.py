"""What each rank computes in one training step; the trainer shards and compiles it.

on each rank                                                    shape
------------------------------------------------------------    -------------------------------------------
params, optimizer state                                         full, equal on all ranks, or this rank's shards
copies of params in the compute dtype                           full, equal on all ranks; none without one
model state                                                     full, equal on all ranks
batch                                                           [global_batch / num_ranks, ...]
compression state                                               [1, ...], this rank's

accumulate    grads  = sum over micro-batches of d total / d params           d copies, where the loss takes those
                                                                              d (scale * total) with a loss_scale
reduce        grads  = sum over ranks of grads / sum of weights               this rank's shards under ZeRO
clip          grads *= min(1, max_grad_norm / norm)
model state   mean over ranks, or that of rank 0                              model_state.py
update        params, optimizer state = optimizer(grads)                      this rank's shards under ZeRO
average       ema    = ema_decay * ema + (1 - ema_decay) * params             the same
gather        params = all-gather of the ranks' shards                        ZeRO 1 and 2
              copies = the same of the shards in the compute dtype            there params stay shards
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from ..communication.axes import shard_axis
from ..communication.buckets import BucketPlan
from ..communication.collectives import Axis, all_gather
from ..communication.ordering import order_token
from ..communication.reduction import (
    REDUCE_SCATTER,
    MeanGradients,
    Reduction,
    finish_reduction,
    sends_uncopied,
    start_reduction,
    sum_of_squares,
)
from ..communication.sharding import Blocks, Cut
from ..loss import PartialLoss, Parts, denominator, divide
from ..metrics import PerExample, map_per_example
from ..scopes import LOSS_SCOPE, METRICS_SCOPE, OPTIMIZER_SCOPE, OTHER_AXES_SCOPE
from ..strategy import Strategy
from ..tree import merge, named_leaves, path_name, split
from ..zero.clipping import on_shards
from ..zero.leaves import LeafOwners
from ..zero.stage1 import gather_params, local_shards
from .loss_scale import next_scale
from .model_state import became_nonfinite, fold_keys, sync_model_state
from .wide_products import with_wide_products

NONFINITE_STATE = "nonfinite_state"  # metric: whether the step put a NaN or an infinity into the model state


class _TrainState(NamedTuple):
    step: jax.Array  # shape=(), dtype=int32: steps taken
    params: Any  # the user's tree
    opt_state: Any  # optax state of the trainable part
    key: jax.Array  # shape=(), a typed PRNG key
    memory: Any = ()  # state of the compression, by parameter: each rank's own, [num_ranks, ...]
    model_state: Any = ()  # what ``loss_fn`` returns besides the loss and takes again, equal on all ranks
    loss_scale: Any = ()  # a ``LossScale``, equal on all ranks
    copies: Any = ()  # floating params in the compute dtype, full, as the loss takes them; None in place of the others
    ema: Any = ()  # moving average of the trainable params, in shards where the optimizer updates shards


class TrainState(_TrainState):
    """What a training run carries from step to step; ``state_layout.py`` decides which leaves are shards."""

    __slots__ = ()

    def _replace(self, **changes: Any) -> TrainState:
        """Drops the copies of parameters that are replaced; the trainer casts them again."""
        return super()._replace(**({"copies": ()} | changes if "params" in changes else changes))


class _Carried(NamedTuple):
    """What a rank carries over a step, if the step is taken."""

    params: Any  # what this rank updates, trainable
    opt_state: Any
    memory: Any
    model_state: Any
    ema: Any


@dataclass(frozen=True)
class RankStep:
    """One rank's part of a step, for use inside ``shard_map`` over ``axis``, with ``check_vma`` off.

    Of several axes, ZeRO shards over the last; the ``num_replicas`` ranks along the others hold equal shards.
    """

    loss: PartialLoss
    optimizer: optax.GradientTransformationExtraArgs
    strategy: Strategy
    axis: Axis
    num_ranks: int
    num_microbatches: int
    trainable: Callable[[str], bool] | None
    max_grad_norm: float | None
    grad_dtype: Any
    compute_dtype: Any = None
    nonfinite: str = "ignore"
    state_sync: str = "mean"
    num_replicas: int = 1
    other_axes: tuple[str, ...] = ()  # of the mesh, which are XLA's
    ema_decay: float | None = None
    blocks: Mapping[str, Blocks] = field(default_factory=dict)  # of parameters that those split, by name
    cuts: Mapping[str, Cut] = field(default_factory=dict)  # of the parameters that the loss takes as shards, by name
    as_bits: bool = False  # how parameters are gathered, as for ``all_gather``
    leaves: LeafOwners | None = None  # where whole parameters have owners
    grad_dtypes: Mapping[str, Any] = field(default_factory=dict)  # of sums of gradients, by name; their own if missing

    @property
    def num_shards(self) -> int:
        """Number of ranks that sharded state is divided among."""
        return self.num_ranks // self.num_replicas

    def init(self, full: Any, params: Any) -> Any:
        """Makes the optimizer state of what this rank updates.

        Args:
            full: Describes the full parameters.
            params: This rank's.
        """
        trainable = split(params, self.trainable)[0]
        if self.leaves is not None:
            are_full, along = self.compute_dtype is None, shard_axis(self.axis)
            return self.leaves.init(trainable, along, are_full=are_full, as_bits=self.as_bits)
        with self._on_shards(full):
            return self.optimizer.init(self._updated_here(trainable))

    def train(self, plan: BucketPlan, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step.

        Args:
            plan: What to communicate.
            state: This rank's.
            batch: This rank's examples.

        Returns:
            The next state, and the metrics, equal on every rank.
        """
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), lax.axis_index(self.axis))
        trainable, frozen = split(self.used(state), self.trainable)
        masters, fixed = split(state.params, self.trainable)
        model_state, has_state = state.model_state, bool(jax.tree.leaves(state.model_state))
        if has_state:
            model_state = fold_keys(model_state, self.axis)
        scale = _scale(state)
        (total, parts, token), model_state = self.accumulate(plan, trainable, frozen, model_state, batch, key, scale)
        grads, parts, metrics, memory = self.reduce(plan, total, parts, token, state.memory, scale)
        if has_state:
            model_state = self.placed(model_state, None) if self.other_axes else model_state
            model_state = sync_model_state(model_state, self.axis, self.num_ranks, self.state_sync)
        with jax.named_scope(OPTIMIZER_SCOPE):
            params = self._updated_here(masters)
            old = _Carried(params, state.opt_state, memory=state.memory, model_state=state.model_state, ema=state.ema)
            grads = self.clip(grads, params, metrics["grad_norm"])
            params, opt_state = self.update(grads, params, state.opt_state, metrics["loss"], trainable)
            new = _Carried(params, opt_state, memory, model_state, self.average(params, state.ema))
            metrics |= _learning_rate(opt_state if self.leaves is None else opt_state.shared)
            new, loss_scale, more = self.take_or_skip(new, old, state.loss_scale, metrics, parts.loss.weight)
        gathered = self.gather(plan, new.params, trainable)
        if jax.tree.leaves(state.copies):  # they may be a single array
            params, copies = merge(new.params, fixed), merge(gathered, split(state.copies, self.trainable)[1])
        else:
            params, copies = merge(gathered, fixed), ()
        others = new.memory, new.model_state, loss_scale, copies, new.ema
        return TrainState(state.step + 1, params, new.opt_state, state.key, *others), metrics | more

    def used(self, state: TrainState) -> Any:
        """Gives what the loss takes: copies in the compute dtype, where there are any, in place of parameters."""
        return merge(state.copies, state.params) if jax.tree.leaves(state.copies) else state.params

    def accumulate(
        self, plan: BucketPlan, trainable: Any, frozen: Any, model_state: Any, batch: Any, key: jax.Array, scale: Any
    ) -> tuple[tuple[Any, Parts, jax.Array], Any]:
        """Sums gradients and metrics over the rank's micro-batches, each of which takes the model state of the last.

        Returns:
            The sum of the gradients, a ``Reduction`` if each micro-batch reduces its own; that of the metrics; and an
            order token of the last micro-batch's backward. Then the model state.
        """
        reduces_each, num = self.strategy.reduces_each_microbatch, self.num_microbatches
        sends_as_written = (
            num == 1 and bool(plan.buckets) and not self.other_axes
            and sends_uncopied(plan, self.strategy.reduce, self.strategy.compression)
        )  # fmt: skip

        def microbatch_grads(
            model_state: Any, microbatch: Any, index: jax.Array | int
        ) -> tuple[tuple[Any, Parts, jax.Array], Any]:
            params, token = (trainable, frozen), jnp.int32(0)
            if self.cuts:  # or XLA would gather every unit once, before the loop, and hold all of them (ordering.py)
                params, token = order_token(params, index)
            before = model_state
            grads, (parts, model_state) = self.local_grads(
                *params, before, microbatch, jax.random.fold_in(key, index), scale, are_sent=sends_as_written
            )
            if num > 1:  # a sum over micro-batches then joins the values of examples
                parts = map_per_example(
                    lambda each: jnp.zeros((num, *each.shape), each.dtype).at[index].set(each), parts
                )
            if parts.loss.weight is not None:  # statistics of no examples
                model_state = jax.tree.map(partial(jnp.where, parts.loss.weight == 0), before, model_state)
            if reduces_each:
                start: Callable[..., Any] = partial(self._start_microbatch, plan)
                if self.other_axes:
                    start = self._on_devices(start, self._reduction_specs(plan, {*named_leaves(grads)} - {*plan.names}))
                grads = start(grads, self._divisor_of_one(parts), index)
            return (grads, parts, token), model_state

        if num == 1:
            return microbatch_grads(model_state, batch, 0)
        pieces = jax.tree.map(lambda leaf: leaf.reshape(num, leaf.shape[0] // num, *leaf.shape[1:]), batch)
        earlier = jax.tree.map(lambda leaf: leaf[:-1], pieces)
        last = jax.tree.map(lambda leaf: leaf[-1], pieces)
        shapes, _ = jax.eval_shape(microbatch_grads, model_state, last, 0)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(carry: tuple[Any, Any], item: tuple[Any, jax.Array]) -> tuple[tuple[Any, Any], None]:
            total, model_state = carry
            found, model_state = microbatch_grads(model_state, *item)
            return (jax.tree.map(jnp.add, total, found), model_state), None

        # The last micro-batch stands outside of the loop, so that its backward and the communication can overlap.
        numbers = jnp.arange(num - 1, dtype=jnp.int32)
        (summed, model_state), _ = lax.scan(add, (zeros, model_state), (earlier, numbers))
        if reduces_each or self.cuts:  # XLA inlines a one-iteration loop and would reduce only once
            summed = lax.optimization_barrier(summed)
        found, model_state = microbatch_grads(model_state, last, num - 1)
        grads, parts, token = jax.tree.map(jnp.add, summed, found)
        parts = map_per_example(lambda each: each.reshape(-1, *each.shape[2:]), parts)
        return (grads, parts, token), model_state

    def reduce(
        self, plan: BucketPlan, total: Any, parts: Parts, token: jax.Array, memory: Any, scale: Any
    ) -> tuple[dict[str, jax.Array], Parts, dict[str, Any], Any]:
        """Sums gradients and metrics over ranks, and divides them.

        Returns:
            What this rank keeps of each mean gradient, by name; the summed parts of the metrics; the metrics; and the
            next state of the compression.
        """
        parts = self.sum_parts(parts)
        num_parts = self.num_ranks * self.num_microbatches
        loss, aux = divide(parts, num_parts)
        divisor = denominator(parts.loss, num_parts)
        divisor = divisor if scale is None else divisor * scale
        if self.other_axes:
            means = self._means_of_blocks(plan, total, token, divisor)
        else:
            means, memory = self._mean_gradients(plan, total, token, memory, divisor)
        shard_squares = means.shard_squares
        if self.strategy.shards_optimizer_state and self.num_ranks > 1:
            with jax.named_scope(METRICS_SCOPE):
                shard_squares = lax.psum(shard_squares, shard_axis(self.axis))
        metrics = {"loss": loss, "grad_norm": jnp.sqrt(means.replicated_squares + shard_squares)}
        return means.grads, parts, metrics if aux is None else metrics | {"aux": aux}, memory

    def _mean_gradients(
        self, plan: BucketPlan, total: Any, token: jax.Array, memory: Any, divisor: Any
    ) -> tuple[MeanGradients, Any]:
        if not isinstance(total, Reduction):
            memory = jax.tree.map(lambda leaf: leaf[0], memory)
            total, memory = start_reduction(
                total, plan, self.axis, self.strategy.reduce, self.strategy.compression, memory, divisor,
                reduced=self.cuts,
            )  # fmt: skip
            memory = jax.tree.map(lambda leaf: leaf[None], memory)
        total = total._replace(order_token=total.order_token + token)
        return finish_reduction(total, plan, self.num_shards, self.strategy.reduce, divisor), memory

    def _means_of_blocks(self, plan: BucketPlan, total: Any, token: jax.Array, divisor: Any) -> MeanGradients:
        """Does the same of gradients that are split along other axes."""
        shards = self.strategy.reduce is REDUCE_SCATTER

        def on_device(total: Any, token: jax.Array, divisor: Any) -> dict[str, jax.Array]:
            means, _ = self._mean_gradients(plan, total, token, (), divisor)
            return {name: mean.reshape(-1) if shards else mean for name, mean in means.grads.items()}

        if isinstance(total, Reduction):
            names, specs = {*plan.names, *total.unsent}, self._reduction_specs(plan, total.unsent)
        else:
            names, specs = {*named_leaves(total)}, self._specs(total)
        out_specs = {name: self._spec(name, flat=shards) for name in names}
        means = self._on_devices(on_device, out_specs, specs)(total, token, divisor)
        with jax.named_scope(METRICS_SCOPE):
            of_shards = [mean for name, mean in means.items() if shards or name in self.cuts]
            others = [mean for name, mean in means.items() if not (shards or name in self.cuts)]
            return MeanGradients(means, sum_of_squares(others), sum_of_squares(of_shards))

    def _start_microbatch(self, plan: BucketPlan, grads: Any, divisor: Any, number: jax.Array | int) -> Reduction:
        # Two buckets in flight save memory: one arrives while the next one fills.
        return start_reduction(
            grads, plan, self.axis, self.strategy.reduce, self.strategy.compression, denominator=divisor,
            max_in_flight=2 if self.num_microbatches > 1 else None, number=number, reduced=self.cuts,
        )[0]  # fmt: skip

    def _on_devices(self, function: Callable[..., Any], out_specs: Any, in_specs: Any = None) -> Callable[..., Any]:
        """Maps a function over the devices of a rank, each of which has its blocks of the first argument."""

        def mapped(tree: Any, *others: Any) -> Any:
            specs = (self._specs(tree) if in_specs is None else in_specs, *(PartitionSpec() for _ in others))
            with jax.named_scope(OTHER_AXES_SCOPE):  # where blocks lie otherwise before or after
                return jax.shard_map(
                    function, in_specs=specs, out_specs=out_specs, axis_names={*self.other_axes}, check_vma=False
                )(tree, *others)

        return mapped

    def placed(self, tree: Any, shardings: Any) -> Any:
        """Places a tree along the other axes as shardings over the mesh do, a prefix of it; None is equal on them.

        XLA would place the state as the loss uses it, and send it back at the end of every step.
        """

        def place(leaf: jax.Array, sharding: NamedSharding | None) -> jax.Array:
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                return leaf
            axes = () if sharding is None else sharding.spec
            of_leaf = [(one,) if isinstance(one, str) else one or () for one in axes]
            spec = PartitionSpec(*(tuple(axis for axis in one if axis in self.other_axes) or None for one in of_leaf))
            with jax.named_scope(OTHER_AXES_SCOPE):
                return lax.with_sharding_constraint(leaf, spec)

        of_leaves = jax.tree.broadcast(shardings, tree, is_leaf=lambda leaf: leaf is None)
        return jax.tree.map(place, tree, of_leaves)

    def _specs(self, params: Any, *, shards: bool = False) -> Any:
        """How parameters, or their shards, lie along the other axes."""
        return jax.tree_util.tree_map_with_path(lambda path, _: self._spec(path_name(path), shards=shards), params)

    def _spec(self, name: str, *, shards: bool = False, flat: bool = False) -> PartitionSpec:
        blocks = self.blocks.get(name)
        if blocks is None:
            return PartitionSpec()
        return PartitionSpec(blocks.axes) if flat else blocks.shard_spec if shards or name in self.cuts else blocks.spec

    def _reduction_specs(self, plan: BucketPlan, unsent: Collection[str]) -> Any:
        """How a ``Reduction`` to shards lies along the other axes: each device has buckets of its own."""
        totals = tuple(PartitionSpec(self.other_axes) for _ in plan.buckets)
        specs: Any = totals, {name: self._spec(name, shards=True) for name in unsent}, PartitionSpec(), {}
        return Reduction(*specs)

    def clip(self, grads: dict[str, jax.Array], params: Any, norm: jax.Array) -> Any:
        """Scales gradients to ``max_grad_norm``, and gives them the structure, shapes and dtypes of ``params``."""
        scale = None if self.max_grad_norm is None else jnp.minimum(1.0, self.max_grad_norm / norm)

        def clipped(path: Any, param: jax.Array) -> jax.Array:
            grad = grads[path_name(path)].reshape(param.shape)
            return (grad if scale is None else grad * scale.astype(grad.dtype)).astype(param.dtype)

        return jax.tree_util.tree_map_with_path(clipped, params)

    def update(self, grads: Any, params: Any, opt_state: Any, loss: jax.Array, full: Any) -> tuple[Any, Any]:
        """Gives the updated parameters and optimizer state: of this rank's shards of ``full``, or of all of it."""
        if self.leaves is not None:
            return self.leaves.update(
                grads, opt_state, params, loss, shard_axis(self.axis),
                full=full if self.compute_dtype is None else None, sends=self.strategy.compression.sends,
                as_bits=self.as_bits,
            )  # fmt: skip
        with self._on_shards(full):
            updates, opt_state = self.optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    def average(self, updated: Any, ema: Any) -> Any:
        """Gives the next moving average of what this rank updates, if one is kept."""
        return ema if self.ema_decay is None else optax.incremental_update(updated, ema, 1 - self.ema_decay)

    def take_or_skip(
        self, new: _Carried, old: _Carried, loss_scale: Any, metrics: Mapping[str, Any], weight: jax.Array | None
    ) -> tuple[_Carried, Any, dict[str, Any]]:
        """Gives what holds after the step: ``old``, bit for bit, where the step must not move anything.

        That is where the whole batch has no weight, since weight decay and momentum would move parameters, and with
        ``nonfinite="skip"`` where a number is not finite. Loss, norm and model state are equal on all ranks, so all
        ranks decide alike.

        Returns:
            What holds, the next loss scale, and further metrics.
        """
        conditions, found = [] if weight is None else [weight != 0], {}
        if self.nonfinite != "ignore" and jax.tree.leaves(new.model_state):
            found[NONFINITE_STATE] = became_nonfinite(new.model_state, old.model_state)
        if self.nonfinite == "skip":
            is_finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            conditions.append(is_finite & ~found.get(NONFINITE_STATE, jnp.bool_(False)))
            found["skipped"] = 1 - conditions[-1].astype(jnp.int32)
        if loss_scale:
            found["loss_scale"], loss_scale = loss_scale.scale, next_scale(loss_scale, conditions[-1])
        if conditions:
            is_taken = jnp.stack(conditions).all()
            new = jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), new, old)
        return new, loss_scale, found

    def gather(self, plan: BucketPlan, updated: Any, trainable: Any) -> Any:
        """Gives what the loss takes next: updated parameters in the dtypes of ``trainable``, full if these are.

        The cast comes before the gather, so that copies are gathered in the compute dtype.
        """
        updated = jax.tree.map(lambda new, old: new.astype(old.dtype), updated, trainable)
        if self.strategy.reduce is not REDUCE_SCATTER:
            return updated
        gather = partial(
            gather_params, plan=plan, axis=shard_axis(self.axis), sends=self.strategy.compression.sends,
            as_bits=self.as_bits,
        )  # fmt: skip
        if not self.other_axes:
            return gather(updated, trainable)
        specs = self._specs(trainable)
        gather_blocks = self._on_devices(
            lambda trees: gather(*trees), specs, (self._specs(trainable, shards=True), specs)
        )
        return gather_blocks((updated, trainable))

    def evaluate(self, state: TrainState, batch: Any) -> Any:
        """Gives the global mean loss of a batch and the aux values, if there are any, equal on every rank."""
        _, (parts, _) = self.loss(self.used(state), state.model_state, batch, None)
        loss, aux = divide(self.sum_parts(parts), self.num_ranks)
        return loss if parts.aux is None else (loss, aux)

    def measure(self, measure: Callable[..., Any], state: TrainState, inputs: tuple[Any, jax.Array]) -> dict[str, Any]:
        """Gives what a ``Measure`` does of the examples of all ranks, equal on every rank."""
        return self.sum_parts(measure(self.used(state), state.model_state, inputs))

    def first_grads(self, state: TrainState, batch: Any) -> tuple[Any, tuple[Parts, Any]]:
        """Gives ``local_grads`` of the first micro-batch; traced for the order in which gradients are ready."""
        trainable, frozen = split(self.used(state), self.trainable)
        microbatch = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] // self.num_microbatches], batch)
        return self.local_grads(trainable, frozen, state.model_state, microbatch, state.key, _scale(state))

    def local_grads(
        self,
        trainable: Any,
        frozen: Any,
        model_state: Any,
        batch: Any,
        key: jax.Array | None,
        scale: Any = None,
        *,
        are_sent: bool = False,
    ) -> tuple[Any, tuple[Parts, Any]]:
        """This rank's gradients, metrics and model state of a micro-batch.

        With ``check_vma`` on, ``trainable`` and the loss must vary over ranks, or autodiff sums gradients over them.
        Gradients of ``cuts`` are shards summed over ranks. With a ``scale``, gradients are those of the scaled loss.
        ``are_sent`` says that gradients are sent as they are written, so that casting one would be a kernel of its own.
        """

        def loss(trainable: Any) -> tuple[jax.Array, tuple[Parts, Any]]:
            total, others = self.loss(merge(trainable, frozen), model_state, batch, key)
            if scale is None:
                return total, others
            total = total.astype(jnp.promote_types(total.dtype, jnp.float32))
            return total * scale.astype(total.dtype), others

        def cast(path: Any, grad: jax.Array) -> jax.Array:
            return grad.astype(self.grad_dtypes.get(path_name(path), grad.dtype))

        def cast_grads(trainable: Any) -> tuple[Any, tuple[Parts, Any]]:
            with jax.named_scope(LOSS_SCOPE):
                grads, others = jax.grad(loss, has_aux=True)(trainable)
            return jax.tree_util.tree_map_with_path(cast, grads), others

        return with_wide_products(cast_grads, trainable) if are_sent else cast_grads(trainable)

    def _divisor_of_one(self, parts: Parts) -> jax.Array | int:
        """Makes a mean of the sum over ranks of one micro-batch, which a compression may need to stay in range."""
        if not self.strategy.compression.needs_denominator:
            return 1
        return denominator(self.sum_parts(Parts(parts.loss, None)).loss, self.num_ranks)

    def sum_parts(self, parts: Any) -> Any:
        """Sums metrics over ranks, in one all-reduce and one for each integer dtype, and joins values of examples."""
        if self.num_ranks == 1:
            return parts
        leaves, structure = jax.tree.flatten(parts, is_leaf=lambda leaf: isinstance(leaf, PerExample))
        places: dict[Any, list[int]] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, PerExample):
                with jax.named_scope(METRICS_SCOPE):
                    leaves[place] = PerExample(all_gather(leaf.values, self.axis, equal=True))
            else:
                places.setdefault(leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.integer) else "float", []).append(place)
        for alike in places.values():
            flat, unravel = ravel_pytree([leaves[place] for place in alike])
            with jax.named_scope(METRICS_SCOPE):
                flat = lax.psum(flat, self.axis)
            for place, total in zip(alike, unravel(flat), strict=True):
                leaves[place] = total
        return jax.tree.unflatten(structure, leaves)

    def _on_shards(self, params: Any) -> contextlib.AbstractContextManager[None]:
        """Where the optimizer is called: it may ask for norms over the ranks' shards of ``params``."""
        if not self.strategy.shards_optimizer_state:
            return contextlib.nullcontext()
        cuts = {name: self.cuts.get(name) for name in named_leaves(params)}
        if not self.strategy.shards_params:
            shapes = {name: leaf.shape for name, leaf in named_leaves(params).items()}
            shapes |= {name: of.shape_of(shapes[name]) for name, of in self.blocks.items() if name in shapes}
            cuts = {name: Cut(shape, self.num_shards) for name, shape in shapes.items()}
        return on_shards(shard_axis(self.axis), cuts)

    def _updated_here(self, params: Any) -> Any:
        """What this rank updates: the parameters as it holds them, or its shards of full ones."""
        holds_full = self.strategy.reduce is REDUCE_SCATTER and self.compute_dtype is None
        if not holds_full:
            return params
        cut: Callable[[Any], Any] = partial(local_shards, axis=shard_axis(self.axis))
        if self.other_axes:
            cut = self._on_devices(cut, self._specs(params, shards=True))
        return cut(params)


def _learning_rate(opt_state: Any) -> dict[str, Any]:
    """The metric of an optimizer whose state has a rate, as ``optax.inject_hyperparams`` keeps it, or several."""
    rates = {
        path_name(path[:-2]): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
        if path_name(path[-2:]) == "hyperparams.learning_rate"
    }
    return {"learning_rate": rates if len(rates) > 1 else next(iter(rates.values()))} if rates else {}


def _scale(state: TrainState) -> jax.Array | None:
    """What the loss is multiplied by, if it is."""
    return state.loss_scale.scale if state.loss_scale else None
