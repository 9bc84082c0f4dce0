"""What each rank computes in one training step; the trainer shards and compiles it.

on each rank                                                    shape
------------------------------------------------------------    -------------------------------------------
params, optimizer state                                         full, equal on all ranks, or this rank's shards
batch                                                           [global_batch / num_ranks, ...]
micro-batches 1 ... A-1:  grads += d total / d params           a loop; only shards are communicated in it
micro-batch A:            grads += d total / d params           communicated as the strategy plans
memory                                                          [1, ...], this rank's, where gradients are compressed
grads = sum over ranks / sum of weights                         what this rank updates of them
params, state = optimizer(grads)                                what this rank updates of them
params = all-gather                                             where it updated shards of full ones
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ..communication.collectives import all_reduce
from ..communication.reduction import Reduction, finish_reduction, start_reduction
from ..communication.sharding import Cut
from ..loss import PartialLoss, Parts, denominator, divide
from ..planning.buckets import BucketPlan
from ..scopes import METRICS_SCOPE, OPTIMIZER_SCOPE
from ..strategy import Strategy
from ..tree import like, merge, named_leaves, split
from ..zero.clipping import on_shards
from ..zero.stage1 import gather_params, own_shards


class TrainState(NamedTuple):
    """What a training run carries from step to step; ``state_layout.py`` says what of it is cut into shards."""

    step: jax.Array  # shape=(), dtype=int32: steps taken
    params: Any  # the user's tree
    opt_state: Any  # optax state of the trainable part
    key: jax.Array  # shape=(), a typed PRNG key
    memory: Any = ()  # what the compression remembers, by parameter: each rank's own, [num_ranks, ...]


@dataclass(frozen=True)
class RankStep:
    """One rank's part of a step, for use inside ``shard_map`` over ``axis``."""

    loss: PartialLoss
    optimizer: optax.GradientTransformationExtraArgs
    strategy: Strategy
    axis: str
    num_ranks: int
    num_microbatches: int
    trainable: Callable[[str], bool] | None
    max_grad_norm: float | None
    grad_dtype: Any
    cuts: Mapping[str, Cut] = field(default_factory=dict)  # of the parameters that the loss takes in shards, by name

    def init(self, params: Any) -> Any:
        """Makes the optimizer state of what this rank updates."""
        return self.optimizer.init(self._own(split(params, self.trainable)[0]))

    def train(self, plan: BucketPlan, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step.

        Args:
            plan: What to communicate.
            state: This rank's.
            batch: This rank's examples.

        Returns:
            The next state, and the metrics, equal on every rank.
        """
        trainable, frozen = split(state.params, self.trainable)
        total, parts, mark = self._accumulate(plan, self._as_own(trainable), frozen, batch, self._key(state))
        parts = self._sum_parts(parts)
        num_parts = self.num_ranks * self.num_microbatches
        loss, aux = divide(parts, num_parts)
        divisor = denominator(parts.loss, num_parts)
        memory = jax.tree.map(lambda leaf: leaf[0], state.memory)
        sums, memory = (total, memory) if self._sends_each else self._send(plan, total, memory, divisor)
        sums = sums._replace(order_token=sums.order_token + mark)
        means, squares, shard_squares = finish_reduction(sums, plan, self.num_ranks, self.strategy.reduce, divisor)
        norm = jnp.sqrt(squares + self._sum_squares(shard_squares))
        with jax.named_scope(OPTIMIZER_SCOPE):
            own = self._own(trainable)
            grads = jax.tree.map(lambda grad, param: grad.reshape(param.shape), like(own, means), own)
            if self.max_grad_norm is not None:
                scale = jnp.minimum(1.0, self.max_grad_norm / norm)
                grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
            grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, own)
            with on_shards(self.axis, self._cuts(trainable)) if self.strategy.stage else contextlib.nullcontext():
                updates, opt_state = self.optimizer.update(grads, state.opt_state, own, value=loss)
            updated = optax.apply_updates(own, updates)
            memory = jax.tree.map(lambda leaf: leaf[None], memory)
            if parts.loss.weight is not None:  # where nothing counted, decay and momentum must not move anything either
                counted = parts.loss.weight != 0
                updated, opt_state, memory = jax.tree.map(
                    lambda new, old: jnp.where(counted, new, old),
                    (updated, opt_state, memory),
                    (own, state.opt_state, state.memory),
                )
        if self.strategy.stage in (1, 2):
            updated = gather_params(updated, trainable, plan, self.axis, sends=self.strategy.compression.sends)
        metrics = {"loss": loss, "grad_norm": norm, **({} if aux is None else {"aux": aux})}
        return TrainState(state.step + 1, merge(updated, frozen), opt_state, state.key, memory), metrics

    def evaluate(self, state: TrainState, batch: Any) -> jax.Array:
        """Gives the global mean loss of a batch, equal on every rank; ``batch`` is this rank's examples."""
        _, parts = self.loss(state.params, batch, self._key(state))
        return divide(self._sum_parts(parts), self.num_ranks)[0]

    def first_grads(self, state: TrainState, batch: Any) -> Any:
        """Gives this rank's gradients of its first micro-batch; traced to see in which order they become ready.

        Returns:
            Those that are still to be sent, and the shards of others.
        """
        trainable, frozen = split(state.params, self.trainable)
        rows = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] // self.num_microbatches], batch)
        return self._by_kind(self._grads(self._as_own(trainable), frozen, rows, self._key(state))[0])

    def _by_kind(self, grads: Any) -> tuple[Any, Any]:
        """Splits gradients into whole ones, and shards that are summed over ranks already."""
        return split(grads, lambda name: name not in self.cuts)

    @property
    def _sends_each(self) -> bool:
        """Whether every micro-batch sends its gradients, or only the last, the sum of all."""
        return self.strategy.accumulate == "shards"

    def _send(self, plan: BucketPlan, grads: Any, memory: Any, divisor: jax.Array | float) -> tuple[Reduction, Any]:
        whole, shards = self._by_kind(grads)
        route, compression = self.strategy.reduce, self.strategy.compression
        # Where shards are what accumulates, memory is what counts: one bucket arrives while the next one fills.
        limit = 2 if self._sends_each and self.num_microbatches > 1 else None
        sums, memory = start_reduction(whole, plan, self.axis, route, compression, memory, divisor, limit)
        return sums._replace(shards=named_leaves(shards)), memory

    def _accumulate(
        self, plan: BucketPlan, trainable: Any, frozen: Any, batch: Any, key: jax.Array
    ) -> tuple[Any, Parts, jax.Array]:
        """Sums over the rank's micro-batches: gradients, as ``Reduction`` if each sends its own, and metrics.

        Returns:
            The two, and a number that is 0 and not known to the compiler before the last micro-batch.
        """
        each = self._sends_each

        def one(microbatch: Any, index: jax.Array | int) -> tuple[Any, Parts, jax.Array]:
            # With units to gather, XLA must not know that each micro-batch gathers the same: it would gather all units
            # before the loop, and hold them. The number that comes out unknown is used, or it would be dropped.
            params, mark = (trainable, frozen), jnp.int32(0)
            if self.cuts:
                params, mark = lax.optimization_barrier((params, jnp.int32(index)))
                mark -= jnp.int32(index)
            grads, parts = self._grads(*params, microbatch, jax.random.fold_in(key, index))
            return self._send(plan, grads, (), 1)[0] if each else grads, parts, mark

        num = self.num_microbatches
        if num == 1:
            total, parts, mark = one(batch, 0)
        else:
            pieces = jax.tree.map(lambda leaf: leaf.reshape(num, leaf.shape[0] // num, *leaf.shape[1:]), batch)
            earlier = jax.tree.map(lambda leaf: leaf[:-1], pieces)
            last = jax.tree.map(lambda leaf: leaf[-1], pieces)
            shapes = jax.eval_shape(one, last, 0)
            zeros = self._as_own(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))

            def add(total: Any, item: tuple[Any, jax.Array]) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, one(*item)), None

            # The last micro-batch stands outside of the loop, so that its backward and the communication can overlap.
            summed, _ = lax.scan(add, zeros, (earlier, jnp.arange(num - 1, dtype=jnp.int32)))
            if each or self.cuts:  # a loop of one round is none, and XLA would add up first and send once
                summed = lax.optimization_barrier(summed)
            total, parts, mark = jax.tree.map(jnp.add, summed, one(last, num - 1))
        return total, parts, mark

    def _grads(self, trainable: Any, frozen: Any, batch: Any, key: jax.Array) -> tuple[Any, Parts]:
        def total(part: Any) -> tuple[jax.Array, Parts]:
            return self.loss(merge(part, frozen), batch, key)

        grads, parts = jax.grad(total, has_aux=True)(trainable)
        if self.grad_dtype is not None:
            grads = jax.tree.map(lambda grad: grad.astype(self.grad_dtype), grads)
        return grads, parts

    def _sum_parts(self, parts: Parts) -> Parts:
        """Sums metrics over ranks, all in one all-reduce of their own."""
        if self.num_ranks == 1:
            return parts
        leaves, structure = jax.tree.flatten(parts)
        dtype = jnp.result_type(*leaves)
        with jax.named_scope(METRICS_SCOPE):
            flat = all_reduce(jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in leaves]), self.axis)
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        sums = [
            piece.reshape(leaf.shape).astype(leaf.dtype)
            for piece, leaf in zip(jnp.split(flat, ends), leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, sums)

    def _sum_squares(self, squares: jax.Array) -> jax.Array:
        """Sums over ranks the squares of what each of them alone updates."""
        if self.strategy.stage == 0 or self.num_ranks == 1:
            return squares
        with jax.named_scope(METRICS_SCOPE):
            return all_reduce(squares, self.axis)

    def _cuts(self, trainable: Any) -> dict[str, Cut | None]:
        """How the parameters are cut of which this rank updates shards, by name; None for those that are whole."""
        if self.strategy.stage < 3:
            return {name: Cut(leaf.shape, self.num_ranks) for name, leaf in named_leaves(trainable).items()}
        return {name: self.cuts.get(name) for name in named_leaves(trainable)}

    def _own(self, params: Any) -> Any:
        """What this rank updates of the parameters."""
        return own_shards(params, self.axis) if self.strategy.stage in (1, 2) else params

    def _key(self, state: TrainState) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(state.key, state.step), lax.axis_index(self.axis))

    def _as_own(self, tree: Any) -> Any:
        # Marked as varying, parameters are differentiated on each rank alone; otherwise AD would add all-reduces.
        return jax.tree.map(lambda leaf: lax.pcast(leaf, self.axis, to="varying"), tree)
