"""Carries out a bucket plan: gradients are packed into buffers, summed over ranks, and divided.

    buffer[k]  = pack(gradients of bucket k)             as soon as its last gradient is ready; on GPUs of small ones,
                                                         and for all-reduces after buffer[k-1]
    total[k]   = sum over ranks of buffer[k]             an all-reduce or a reduce-scatter, in flight until it is used
    mean[k]    = total[k] / denominator                  after buffer[0 ... n] and squares[k-1]
    squares[k] = squares[k-1] + sum(mean[k]^2)           norm = sqrt(squares[n])

``start_reduction`` does the first two lines, ``finish_reduction`` the others. Between the two, the reductions of
several micro-batches may be added. All strategies use both; they differ in the plan, and in whether a bucket is
all-reduced or reduce-scattered (``Reduce``).

The dependencies on other buckets are there for their order alone (``ordering.py``): a bucket divided earlier would
make the backward wait for the network. XLA fuses the sum of squares with the update of the bucket's parameters, so
buckets are updated in the order in which they arrive, while later reductions are in flight.

For small tensors, only the first of a bucket gets its own sum of squares (it enforces the order); the rest share one.
Every further sum lengthens compilation: XLA's fusion walks the whole program once more for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..scopes import SYNC_SCOPE
from ..tree import named_leaves
from .axes import scatter_sum, shard_axis
from .buckets import Bucket, BucketPlan
from .buffers import pack, pack_small, unpack, unpack_small
from .collectives import MAX_JOINED, Axis, all_reduce_as_one, joins_arrays
from .compression import Compression, none
from .low_rank import apply_residual
from .ordering import order_token
from .sharding import Cut, pack_chunks, split_chunks
from .varying import varying

# Tensors share a sum of squares if a rank keeps at most this many elements of each, on average over the bucket: reading
# the bucket once more then costs a GPU no more than a sum for each. At this size (64 KiB in float32) the simulated step
# of 400 tensors takes the same 1.55 ms with 235 kernels instead of 515.
SMALL = 16_384


class Reduce(NamedTuple):
    """How a bucket is summed over ranks.

    Attributes:
        kind: Of the collective.
        pack: ``(bucket, gradients by name, num_shards) -> buffer``.
        send: ``(buffer, axis) ->`` what this rank keeps of the sum over ranks.
        keep: ``(buffer, axis) ->`` the same part of its own buffer, without communication.
        unpack: ``(bucket, what send returned, num_shards) -> arrays by name``.
        local_shard: ``(gradient, num_shards, shard) ->`` what a rank keeps of a gradient that is equal on all ranks.
    """

    kind: str
    pack: Callable[[Bucket, Mapping[str, jax.Array], int], jax.Array]
    send: Callable[[jax.Array, Axis], jax.Array]
    keep: Callable[[jax.Array, Axis], jax.Array]
    unpack: Callable[[Bucket, jax.Array, int], dict[str, jax.Array]]
    local_shard: Callable[[jax.Array, int, jax.Array], jax.Array]


ALL_REDUCE = Reduce(
    "all-reduce",
    pack=lambda bucket, grads, num_shards: pack(bucket, grads),
    send=lax.psum,
    keep=lambda buffer, axis: buffer,
    unpack=lambda bucket, total, num_shards: unpack(bucket, total),
    local_shard=lambda grad, num_shards, shard: grad,
)

# The buffer is [N, width]; rank r of the N along the shard axis keeps row r of the sum.
REDUCE_SCATTER = Reduce(
    "reduce-scatter",
    pack=pack_chunks,
    send=lambda buffer, axis: scatter_sum(buffer, axis)[0],
    keep=lambda buffer, axis: lax.dynamic_index_in_dim(buffer, lax.axis_index(shard_axis(axis)), keepdims=False),
    unpack=split_chunks,
    local_shard=lambda grad, num_shards, shard: Cut(grad.shape, num_shards).local_shard(grad, shard),
)


class Reduction(NamedTuple):
    """Sums over ranks, started or finished; those of several micro-batches may be added.

    Attributes:
        totals: What this rank keeps of the sum, for each bucket of the plan: an array, or on GPUs the
            tuple of those that one call sends.
        unsent: Sums of the gradients that the plan leaves out, by name.
        order_token: A zero, available when every bucket is packed.
        shards: This rank's shards of gradients that the backward itself has summed over ranks (``zero3``), by name.
    """

    totals: tuple[Any, ...]
    unsent: dict[str, jax.Array]
    order_token: jax.Array
    shards: dict[str, jax.Array]


class MeanGradients(NamedTuple):
    """What this rank keeps of the mean gradients.

    Attributes:
        grads: By name.
        replicated_squares: Sum of squares of those that are equal on every rank.
        shard_squares: Sum of squares of those that are this rank's shards.
    """

    grads: dict[str, jax.Array]
    replicated_squares: jax.Array
    shard_squares: jax.Array


def start_reduction(
    grads: Any,
    plan: BucketPlan,
    axis: Axis,
    reduce: Reduce,
    compression: Compression,
    state: Any = (),
    denominator: jax.Array | float = 1,
    max_in_flight: int | None = None,
    number: jax.Array | int = 0,
    reduced: Collection[str] = (),
) -> tuple[Reduction, Any]:
    """Packs the gradients of one backward pass and starts to sum them over ranks.

    Args:
        grads: A tree of gradients.
        plan: What to send and what is constant.
        axis: Name of the mesh axis, or of several.
        reduce: All-reduce or reduce-scatter.
        compression: Gradient compression.
        state: This rank's state of the compression, by parameter; empty if it is stateless.
        denominator: What the sums will be divided by; fp16 and compressions with state need to know it.
        max_in_flight: Number of buckets that may be packed before the first of them has arrived; None for any. A limit
            saves memory, and makes the backward wait where the network is slower.
        number: Of the micro-batch. XLA would reduce a bucket that no example touches once for all micro-batches.
        reduced: Names of gradients that the backward has reduced to shards; they are passed on as they are.

    Returns:
        The reduction, and the next state of the compression.

    Raises:
        ValueError: If the plan names a tensor that ``grads`` does not hold, or the other way round, or autodiff has
            summed a gradient already.
    """
    ready = named_leaves(grads)
    shards = {name: ready.pop(name) for name in reduced if name in ready}
    planned = set(plan.names)
    num_ranks, num_shards = lax.axis_size(axis), lax.axis_size(shard_axis(axis))
    if missing := sorted(planned - set(ready)):
        raise ValueError(f"plan names {missing[0]!r}, which grads does not hold: plan and grads must be of one model")
    if (unknown := sorted(set(ready) - planned - set(plan.constants))) and num_ranks > 1:
        raise ValueError(f"grads holds {unknown[0]!r}, which plan does not name: plan and grads must be of one model")
    axes = {axis} if isinstance(axis, str) else set(axis)
    checks_vma = axes <= varying(lax.axis_index(axis))
    for name, grad in ready.items() if checks_vma else ():
        if grad.size and not axes <= varying(grad):
            raise ValueError(
                f"the gradient of {name!r} does not vary over {axis!r}: autodiff has summed it, it would be {num_ranks}"
                f" times too large; differentiate in jax.lax.pcast(params, {axis!r}, to='varying'), leaf by leaf;"
                " pcast what is constant"
            )

    with jax.named_scope(SYNC_SCOPE):
        if plan.after_backward:
            ready = lax.optimization_barrier(ready)
        if num_ranks == 1 and state:
            ready, state = apply_residual(ready, state, denominator)
        shard = lax.axis_index(shard_axis(axis))
        unsent = {
            name: reduce.local_shard(grad * num_ranks, num_shards, shard)
            for name, grad in ready.items()
            if name not in planned
        }
        joins = reduce is ALL_REDUCE and joins_arrays()
        copies_all = not sends_uncopied(plan, reduce, compression)
        totals: list[Any] = []
        all_packed, first_token = jnp.int32(0), jnp.int32(number)
        token = first_token
        for index, bucket in enumerate(plan.buckets):
            if joins:  # each bucket by a key of its own, or XLA would join those that are ready at a time
                reduce = ALL_REDUCE._replace(send=partial(all_reduce_as_one, key=f"{index} {bucket.tensors[0].name}"))
            packed: Any = reduce.pack(bucket, ready, num_shards) if copies_all else pack_small(bucket, ready)
            if not copies_all and len(packed) > MAX_JOINED:
                packed = pack(bucket, ready)
            if max_in_flight is not None and index >= max_in_flight:
                earlier = index - max_in_flight
                packed, totals[earlier] = lax.optimization_barrier((packed, totals[earlier]))
            # XLA would reduce equal buckets, such as biases of parallel branches, once. A number of its own for each
            # prevents that; so does a token that passes from bucket to bucket, which also keeps reductions in flight
            # in the order of the plan, in which their updates wait for them. On TPUs it would delay them.
            if joins:
                buffer, token = lax.optimization_barrier((packed, token))
                zero = token - first_token
            else:
                buffer, zero = order_token(packed, index + len(plan.buckets) * number)
            if not varying(zero):  # under check_vma, on jax 0.10, the results must not depend on it
                all_packed = zero if joins else all_packed + zero
            total, changed = compression.reduce(bucket, buffer, axis, state, reduce, denominator)
            totals.append(total)
            state = {**state, **changed} if changed else state
        if plan.after_backward:
            totals = lax.optimization_barrier(totals)
    return Reduction(tuple(totals), unsent, all_packed, shards), state


def sends_uncopied(plan: BucketPlan, reduce: Reduce, compression: Compression) -> bool:
    """Whether large gradients are sent as they are, and not packed."""
    return reduce is ALL_REDUCE and joins_arrays() and compression is none and not plan.after_backward


def finish_reduction(
    reduction: Reduction, plan: BucketPlan, num_shards: int, reduce: Reduce, denominator: jax.Array | float
) -> MeanGradients:
    """Divides the sums over ranks, bucket by bucket as they arrive.

    ``plan`` and ``reduce`` are those of ``start_reduction``; ``denominator`` divides the sums. ``num_shards`` counts
    the ranks along the shard axis.
    """

    def divide(total: jax.Array, token: jax.Array | int = 0) -> jax.Array:
        # The one division: by the number of ranks and micro-batches, or by the total weight.
        return (total / (denominator + token)).astype(total.dtype)

    # Whatever promotion users allow themselves, a weight of one dtype divides gradients of another.
    with jax.named_scope(SYNC_SCOPE), jax.numpy_dtype_promotion("standard"):
        means = {name: divide(total) for name, total in reduction.unsent.items()}
        squares = sum_of_squares(means.values())
        for bucket, total in zip(plan.buckets, reduction.totals, strict=True):
            total, squares = lax.optimization_barrier((total, squares))  # noqa: PLW2901
            if isinstance(total, tuple):
                parts = tuple(divide(part, reduction.order_token) for part in total)
                means.update(unpack_small(bucket, parts))
                squares += sum_of_squares(parts)
                continue
            buffer = divide(total, reduction.order_token)
            mean = reduce.unpack(bucket, buffer, num_shards)
            first, *others = mean.values()
            if len(others) > 1 and buffer.size <= SMALL * len(mean):
                others = [buffer.reshape(-1)[first.size :]]
            squares += sum_of_squares([first, *others])
            means.update(mean)
        if reduce is REDUCE_SCATTER:
            return MeanGradients(means, jnp.zeros(()), squares)
        shards = {name: divide(total, reduction.order_token) for name, total in reduction.shards.items()}
        return MeanGradients(means | shards, squares, sum_of_squares(shards.values()))


def sum_of_squares(arrays: Iterable[jax.Array]) -> jax.Array:
    """Sums the squares of all elements of some arrays, at least in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)))) for leaf in arrays]
    return sum(squares, start=jnp.zeros(()))
