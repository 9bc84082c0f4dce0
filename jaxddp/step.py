"""What each rank computes in one training step; the trainer shards and compiles it.

on each rank                                                    shape
------------------------------------------------------------    -------------------------------
params, optimizer state                                         full, equal on all ranks
batch                                                           [global_batch / num_ranks, ...]
micro-batches 1 ... A-1:  grads += d total / d params           a loop, nothing is communicated
micro-batch A:            grads += d total / d params           communicated as the strategy plans
grads = sum over ranks / sum of weights                         sync_with_norm
params, state = optimizer(grads)                                the same arithmetic on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .buckets import BucketPlan
from .collectives import all_reduce
from .loss import PartialLoss, Parts, denominator, divide
from .scopes import METRICS_SCOPE, OPTIMIZER_SCOPE
from .strategy import Strategy, sync_with_norm
from .tree import merge, split


class TrainState(NamedTuple):
    """What a training run carries from step to step, equal on every rank."""

    step: jax.Array  # shape=(), dtype=int32: steps taken
    params: Any  # the user's tree
    opt_state: Any  # optax state of the trainable part
    key: jax.Array  # shape=(), a typed PRNG key


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

    def init(self, params: Any) -> Any:
        """Makes the optimizer state of the trainable parameters."""
        return self.optimizer.init(split(params, self.trainable)[0])

    def train(self, plan: BucketPlan, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step.

        Args:
            plan: What to communicate.
            state: Equal on every rank.
            batch: This rank's examples.

        Returns:
            The next state and the metrics, equal on every rank.
        """
        trainable, frozen = split(state.params, self.trainable)
        grads, parts = self._accumulate(self._as_own(trainable), frozen, batch, self._key(state))
        parts = self._sum_parts(parts)
        num_parts = self.num_ranks * self.num_microbatches
        loss, aux = divide(parts, num_parts)
        grads, norm = sync_with_norm(
            grads,
            plan,
            self.axis,
            denominator=denominator(parts.loss, num_parts),
            compression=self.strategy.compression,
        )
        with jax.named_scope(OPTIMIZER_SCOPE):
            if self.max_grad_norm is not None:
                scale = jnp.minimum(1.0, self.max_grad_norm / norm)
                grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
            grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, trainable)
            updates, opt_state = self.optimizer.update(grads, state.opt_state, trainable, value=loss)
            updated = optax.apply_updates(trainable, updates)
            if parts.loss.weight is not None:  # where nothing counted, decay and momentum must not move anything either
                counted = parts.loss.weight != 0
                updated, opt_state = jax.tree.map(
                    lambda new, old: jnp.where(counted, new, old), (updated, opt_state), (trainable, state.opt_state)
                )
        metrics = {"loss": loss, "grad_norm": norm, **({} if aux is None else {"aux": aux})}
        return TrainState(state.step + 1, merge(updated, frozen), opt_state, state.key), metrics

    def evaluate(self, state: TrainState, batch: Any) -> jax.Array:
        """Gives the global mean loss of a batch, equal on every rank; ``batch`` is this rank's examples."""
        _, parts = self.loss(state.params, batch, self._key(state))
        return divide(self._sum_parts(parts), self.num_ranks)[0]

    def first_grads(self, state: TrainState, batch: Any) -> Any:
        """Gives this rank's gradients of its first micro-batch; traced to see in which order they become ready."""
        trainable, frozen = split(state.params, self.trainable)
        rows = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] // self.num_microbatches], batch)
        return self._grads(self._as_own(trainable), frozen, rows, self._key(state))[0]

    def _accumulate(self, trainable: Any, frozen: Any, batch: Any, key: jax.Array) -> tuple[Any, Parts]:
        """Sums gradients and metrics over the rank's micro-batches; no communication."""

        def one(microbatch: Any, index: jax.Array | int) -> tuple[Any, Parts]:
            return self._grads(trainable, frozen, microbatch, jax.random.fold_in(key, index))

        num = self.num_microbatches
        if num == 1:
            return one(batch, 0)
        pieces = jax.tree.map(lambda leaf: leaf.reshape(num, leaf.shape[0] // num, *leaf.shape[1:]), batch)
        earlier = jax.tree.map(lambda leaf: leaf[:-1], pieces)
        last = jax.tree.map(lambda leaf: leaf[-1], pieces)
        shapes = jax.eval_shape(one, last, 0)
        zeros = self._as_own(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))

        def add(total: tuple[Any, Parts], item: tuple[Any, jax.Array]) -> tuple[tuple[Any, Parts], None]:
            return jax.tree.map(jnp.add, total, one(*item)), None

        # The last micro-batch stands outside of the loop, so that its backward and the communication can overlap.
        total, _ = lax.scan(add, zeros, (earlier, jnp.arange(num - 1)))
        return jax.tree.map(jnp.add, total, one(last, num - 1))

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

    def _key(self, state: TrainState) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(state.key, state.step), lax.axis_index(self.axis))

    def _as_own(self, tree: Any) -> Any:
        # Marked as varying, parameters are differentiated on each rank alone; otherwise AD would add all-reduces.
        return jax.tree.map(lambda leaf: lax.pcast(leaf, self.axis, to="varying"), tree)
