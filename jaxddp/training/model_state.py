"""The state of a model beside its parameters: running statistics of BatchNorm, averages, counts, RNG counts.

The loss function takes it and returns the next one. Within a step each rank threads its own through its micro-batches;
at the end of the step the ranks agree:

| leaf                   | ``"mean"``               | ``"first"``, as DDP's ``broadcast_buffers`` |
|------------------------|--------------------------|---------------------------------------------|
| floating               | sum over ranks of x_r, / N | x_0                                       |
| others: counts, keys   | x_0                      | x_0                                         |

It is one all-reduce for floats and one for each other dtype, beside those of the gradients; 16-bit floats are summed in
float32. The mean of running variances is that of the ranks' batches, not the variance of the global batch: for that,
let the loss function average over the axis (``flax.linen.BatchNorm(axis_name="data")``).

A micro-batch of weight 0 (``Weighted``) leaves the state as it was: statistics of no examples are often 0 / 0. PRNG
keys are folded with the rank when a step begins, or all ranks would draw the same dropout mask from them; rank 0 takes
them as they are, so that its keys go on as those of a single process.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..communication.collectives import Axis
from ..communication.planned import wire_bytes
from ..scopes import MODEL_STATE_SCOPE, OTHER_AXES_SCOPE
from ..strategy import Ranks
from .step import sum_over_ranks

STATE_SYNC = ("mean", "first")


def step_with_state(step: Callable[..., Any], ranks: Ranks, how: str, state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """A step before which ranks get keys of their own, and after which their model states are one again."""
    new, metrics, weight = step(state._replace(model_state=fold_keys(state.model_state, ranks.axis)), batch)
    return new._replace(model_state=sync_model_state(new.model_state, ranks, how)), metrics, weight


def fold_keys(model_state: Any, axis: Axis) -> Any:
    """Gives every rank but 0 PRNG keys of its own."""
    rank = lax.axis_index(axis)

    def folded(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        own = jax.vmap(lambda key: jax.random.fold_in(key, rank))(leaf.reshape(-1)).reshape(leaf.shape)
        return jnp.where(rank == 0, leaf, own)

    return jax.tree.map(folded, model_state)


def sync_model_state(model_state: Any, ranks: Ranks, how: str) -> Any:
    """Makes the ranks' model states one; ``how`` is of ``STATE_SYNC``."""
    if ranks.num_ranks == 1:
        return model_state

    def is_mean(leaf: jax.Array) -> bool:
        return how == "mean" and jnp.issubdtype(leaf.dtype, jnp.floating)

    def summand(leaf: jax.Array) -> jax.Array:
        if ranks.other_axes and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            with jax.named_scope(OTHER_AXES_SCOPE):  # or XLA sums the blocks into which the loss has split a leaf
                leaf = lax.with_sharding_constraint(leaf, PartitionSpec())
        numbers = _as_numbers(leaf)
        # Not times 0: the other ranks' may be NaN.
        is_sent = is_mean(leaf) | (lax.axis_index(ranks.axis) == 0)
        return jnp.where(is_sent, numbers, jnp.zeros_like(numbers))

    def result(leaf: jax.Array, total: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(total, impl=jax.random.key_impl(leaf))
        total = total / ranks.num_ranks if is_mean(leaf) else total
        return total.astype(leaf.dtype)

    totals = sum_over_ranks(jax.tree.map(summand, model_state), ranks, MODEL_STATE_SCOPE)
    return jax.tree.map(result, model_state, totals)


def planned_sync(model_state: Any, num_ranks: int, platform: str) -> list[tuple[str, int]]:
    """Lists ``(kind, bytes)`` of the collectives of ``sync_model_state``."""
    alike: dict[Any, list[Any]] = {}
    for leaf in jax.tree.leaves(model_state):
        numbers = jax.eval_shape(_as_numbers, leaf)
        if leaf.size and num_ranks > 1:
            kind = numbers.dtype if jnp.issubdtype(numbers.dtype, jnp.integer) else "float"
            alike.setdefault(kind, []).append(numbers)
    return [
        ("all-reduce", wire_bytes(sum(leaf.size for leaf in leaves), jnp.result_type(*leaves), platform))
        for leaves in alike.values()
    ]


def _as_numbers(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint8)
    # A sum over ranks of 16-bit numbers could overflow.
    is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(jnp.float32) if is_narrow else leaf
