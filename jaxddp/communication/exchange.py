"""Carries a bucket plan out: gradients become buffers, buffers their sums over ranks, sums means.

Every strategy does this; they differ in the plan, and in the route of a buffer: summed on every rank (all-reduce), or
each rank's part of the sum on that rank (reduce-scatter). ``launch`` sends, ``settle`` divides; between the two, sums
of several micro-batches may be added.

What a compiler may do first is what depends on nothing else, so the order is made one of data: no bucket is divided
before every bucket is packed, which is when the backward ends, and none before the squares of the bucket launched
before it are summed. XLA fuses that sum with the bucket's update; so updates follow the buckets as they arrive, and run
under the reductions still to come.

    packed[k]  = pack(grads of bucket k)                         as soon as its last gradient is ready
    total[k]   = sum over ranks of packed[k]                     in flight until it is needed
    mean[k]    = total[k] / denominator                          after packed[0 ... n] and squares[k-1]
    squares[k] = squares[k-1] + sum(mean[k]^2)                   norm = sqrt(squares[n])

A sum for each tensor is an operation more for each, which XLA merges with others one by one, walking the whole program
every time. Of small tensors, therefore, the first of a bucket has its own sum, which holds the order, all others one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..planning.buckets import Bucket, BucketPlan
from ..scopes import SYNC_SCOPE
from ..tree import named_leaves
from .buckets import pack, unpack
from .collectives import all_reduce, reduce_scatter
from .compression import Compression
from .low_rank import pay_back
from .sharding import own_chunk, pack_chunks, split_chunks

# Elements that a rank keeps of a tensor, on average over its bucket, up to which one read of the bucket more costs a
# GPU no more than a sum for each: 64 KiB in float32, where the simulated step of 400 tensors is the same, 1.55 ms, with
# 235 kernels instead of 515.
SMALL = 16_384


class Route(NamedTuple):
    """How the gradients of a bucket travel.

    Attributes:
        kind: Of the collective.
        pack: ``(bucket, gradients by name, num_ranks) -> buffer``.
        send: ``(buffer, axis) -> what this rank keeps of the sum over ranks``.
        keep: The same of its own buffer, without communication.
        unpack: ``(bucket, what send returned, num_ranks) -> arrays by name``.
        own: ``(gradient, num_ranks, rank) -> what this rank keeps of a gradient that is equal on all ranks``.
    """

    kind: str
    pack: Callable[[Bucket, Mapping[str, jax.Array], int], jax.Array]
    send: Callable[[jax.Array, str], jax.Array]
    keep: Callable[[jax.Array, str], jax.Array]
    unpack: Callable[[Bucket, jax.Array, int], dict[str, jax.Array]]
    own: Callable[[jax.Array, int, jax.Array], jax.Array]


WHOLE = Route(
    "all-reduce",
    pack=lambda bucket, grads, num_ranks: pack(bucket, grads),
    send=all_reduce,
    keep=lambda buffer, axis: buffer,
    unpack=lambda bucket, total, num_ranks: unpack(bucket, total),
    own=lambda grad, num_ranks, rank: grad,
)

# The buffer is [N, width]; what a rank keeps of it is the row of that rank's number.
SHARDED = Route(
    "reduce-scatter",
    pack=pack_chunks,
    send=lambda buffer, axis: reduce_scatter(buffer, axis)[0],
    keep=lambda buffer, axis: lax.dynamic_index_in_dim(buffer, lax.axis_index(axis), keepdims=False),
    unpack=split_chunks,
    own=own_chunk,
)


class Sums(NamedTuple):
    """Sums over ranks, under way or arrived; those of several micro-batches may be added.

    Attributes:
        totals: One for each bucket of the plan, as its route leaves it.
        unsent: Sums of the gradients that the plan leaves out, by name.
        mark: Not known to the compiler before every bucket is packed; its value is 0.
        shards: Sums over ranks that the backward itself has left on each rank, by name.
    """

    totals: tuple[jax.Array, ...]
    unsent: dict[str, jax.Array]
    mark: jax.Array
    shards: dict[str, jax.Array]


def launch(
    grads: Any,
    plan: BucketPlan,
    axis: str,
    route: Route,
    compression: Compression,
    memory: Any = (),
    denominator: jax.Array | float = 1,
    max_in_flight: int | None = None,
) -> tuple[Sums, Any]:
    """Packs and sends the gradients of one backward pass.

    Args:
        grads: A tree of gradients.
        plan: What to send and what is constant.
        axis: Name of the mesh axis.
        route: How buckets travel.
        compression: What travels.
        memory: What this rank remembers of tensors, by name, if the compression remembers anything.
        denominator: What the sums will be divided by; only what remembers needs to know it.
        max_in_flight: How many buckets may be packed and not yet have arrived; any number if None. A limit saves their
            memory, and makes the backward wait where the network is slower.

    Returns:
        The sums, and what the compression remembers now.

    Raises:
        ValueError: If the plan names a tensor that ``grads`` does not hold, or the other way round.
    """
    ready = named_leaves(grads)
    planned = set(plan.names)
    num_ranks = lax.axis_size(axis)
    if missing := sorted(planned - set(ready)):
        raise ValueError(f"plan names {missing[0]!r}, which grads does not hold: plan and grads must be of one model")
    if (unknown := sorted(set(ready) - planned - set(plan.constants))) and num_ranks > 1:
        raise ValueError(f"grads holds {unknown[0]!r}, which plan does not name: plan and grads must be of one model")

    with jax.named_scope(SYNC_SCOPE):
        if plan.after_backward:
            ready = lax.optimization_barrier(ready)
        if num_ranks == 1 and memory:
            ready, memory = pay_back(ready, memory, denominator)
        rank = lax.axis_index(axis)
        unsent = {name: route.own(x * num_ranks, num_ranks, rank) for name, x in ready.items() if name not in planned}
        totals: list[jax.Array] = []
        zero = jnp.int32(0)
        for index, bucket in enumerate(plan.buckets):
            # XLA reduces buckets that it can prove equal, such as the biases of parallel branches, only once. A barrier
            # with a number makes them differ; the number comes out unknown to XLA and is used, or it would be dropped.
            packed = route.pack(bucket, ready, num_ranks)
            if max_in_flight is not None and index >= max_in_flight:
                earlier = index - max_in_flight
                packed, totals[earlier] = lax.optimization_barrier((packed, totals[earlier]))
            buffer, mark = lax.optimization_barrier((packed, jnp.int32(index)))
            total, changed = compression.travel(bucket, buffer, axis, memory, route, denominator)
            totals.append(total)
            memory = {**memory, **changed} if changed else memory
            if not _is_varying(mark):  # under check_vma, on jax 0.10, outputs must not take it in
                zero += mark - index
        if plan.after_backward:
            totals = lax.optimization_barrier(totals)
    return Sums(tuple(totals), unsent, zero, {}), memory


def settle(
    sums: Sums, plan: BucketPlan, num_ranks: int, route: Route, denominator: jax.Array | float
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Divides sums over ranks, bucket by bucket as they arrive.

    Args:
        sums: From ``launch``.
        plan: As for ``launch``.
        num_ranks: Number of ranks.
        route: As for ``launch``.
        denominator: What sums are divided by.

    Returns:
        What this rank keeps of each gradient, by name; the sum of the squares of what every rank keeps alike, and of
        what this rank alone keeps.
    """

    def divide(total: jax.Array, mark: jax.Array | int = 0) -> jax.Array:
        # The one division: by the number of ranks and micro-batches, or by the total weight.
        return (total / (denominator + mark)).astype(total.dtype)

    with jax.named_scope(SYNC_SCOPE):
        means = {name: divide(total) for name, total in sums.unsent.items()}
        squares = sum_of_squares(means.values())
        for bucket, total in zip(plan.buckets, sums.totals, strict=True):
            total, squares = lax.optimization_barrier((total, squares))  # noqa: PLW2901
            buffer = divide(total, sums.mark)
            mean = route.unpack(bucket, buffer, num_ranks)
            squares += sum_of_squares(_few(mean, buffer))
            means.update(mean)
        shards = {name: divide(total, sums.mark) for name, total in sums.shards.items()}
        own_squares = sum_of_squares(shards.values())
    if route is SHARDED:
        squares, own_squares = own_squares, squares
    return means | shards, squares, own_squares


def sum_of_squares(arrays: Iterable[jax.Array]) -> jax.Array:
    """Sums the squares of all elements of some arrays, at least in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)))) for leaf in arrays]
    return sum(squares, start=jnp.zeros(()))


def _few(tensors: Mapping[str, jax.Array], buffer: jax.Array) -> list[jax.Array]:
    """The contents of a buffer: the tensors in it or, where they are small, the first and all others as one."""
    first, *others = tensors.values()
    if len(others) < 2 or buffer.size > SMALL * len(tensors):
        return [first, *others]
    return [first, buffer.reshape(-1)[first.size :]]


def _is_varying(x: jax.Array) -> bool:
    kind = jax.typeof(x)
    return bool(kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma)
