"""The state of a model beside its parameters: running statistics of BatchNorm, averages, counts, RNG counts.

The loss function takes it and returns the next one. Within a step each rank threads its own through its micro-batches;
at the end of the step the ranks agree:

| leaf                   | ``"mean"``               | ``"first"``, as DDP's ``broadcast_buffers`` |
|------------------------|--------------------------|---------------------------------------------|
| floating               | sum over ranks of x_r, / N | x_0                                       |
| others: counts, keys   | x_0                      | x_0                                         |

It is one all-reduce for each dtype, beside those of the gradients; 16-bit floats are summed in float32. The mean of
running variances is that of the ranks' batches, not the variance of the global batch: for that, let the loss function
average over the axis (``flax.linen.BatchNorm(axis_name="data")``).

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

from ..communication.collectives import Axis, all_reduce
from ..communication.planned import wire_bytes
from ..scopes import MODEL_STATE_SCOPE, OTHER_AXES_SCOPE
from ..strategy import Ranks

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


def became_nonfinite(new: Any, old: Any) -> jax.Array:
    """Whether a floating leaf has a NaN or an infinity where it had none; a running minimum may start at infinity."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    lost = [
        (jnp.isfinite(before) & ~jnp.isfinite(after)).any()
        for after, before in pairs
        if jnp.issubdtype(after.dtype, jnp.floating)
    ]
    return jnp.stack(lost).any() if lost else jnp.bool_(False)


def sync_model_state(model_state: Any, ranks: Ranks, how: str) -> Any:
    """Makes the ranks' model states one; ``how`` is of ``STATE_SYNC``."""
    leaves, structure = jax.tree.flatten(model_state)
    if ranks.num_ranks == 1 or not leaves:
        return model_state
    if ranks.other_axes:  # or XLA sums the blocks into which the loss has split a leaf
        with jax.named_scope(OTHER_AXES_SCOPE):
            leaves = [
                leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
                else lax.with_sharding_constraint(leaf, PartitionSpec()) for leaf in leaves
            ]  # fmt: skip
    axis, num_ranks = ranks.axis, ranks.num_ranks
    is_first = lax.axis_index(axis) == 0
    with jax.named_scope(MODEL_STATE_SCOPE):
        for places in _by_dtype(leaves).values():
            parts = [_as_numbers(leaves[place]) for place in places]
            flat = jnp.concatenate([part.reshape(-1) for part in parts])
            is_mean = how == "mean" and jnp.issubdtype(flat.dtype, jnp.floating)
            # Not times 0: the other ranks' may be NaN.
            total = all_reduce(flat if is_mean else jnp.where(is_first, flat, jnp.zeros_like(flat)), axis)
            total = total / num_ranks if is_mean else total
            for place, part in zip(places, parts, strict=True):
                mine, total = total[: part.size], total[part.size :]
                leaves[place] = _undo(mine.reshape(part.shape), leaves[place])
    return jax.tree.unflatten(structure, leaves)


def planned_sync(model_state: Any, num_ranks: int, platform: str) -> list[tuple[str, int]]:
    """Lists ``(kind, bytes)`` of the collectives of ``sync_model_state``."""
    if num_ranks == 1:
        return []
    leaves = jax.tree.leaves(model_state)
    numbers = [[jax.eval_shape(_as_numbers, leaves[place]) for place in some] for some in _by_dtype(leaves).values()]
    return [("all-reduce", wire_bytes(sum(one.size for one in some), some[0].dtype, platform)) for some in numbers]


def _by_dtype(leaves: list[Any]) -> dict[Any, list[int]]:
    """Places of the leaves that have elements."""
    places: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if leaf.size:
            places.setdefault(leaf.dtype, []).append(place)
    return places


def _as_numbers(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint8)
    # A sum over ranks of 16-bit numbers could overflow.
    is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(jnp.float32) if is_narrow else leaf


def _undo(numbers: jax.Array, leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(leaf))
    return numbers.astype(leaf.dtype)
