"""Carries out a bucket plan: gradients are packed into buffers, summed over ranks, and divided.

    buffer[k] = pack(gradients of bucket k)       as soon as its last gradient is ready; one tensor is not copied,
                                                  nor are large ones on GPUs, where one all-reduce takes several arrays
    total[k]  = sum over ranks of buffer[k]       an all-reduce or a reduce-scatter, in flight until it is used
    mean[k]   = total[k] / divisor                after every bucket is packed and mean[k-1] was squared

Divided earlier, a bucket would make the backward wait for the network. XLA keeps only the order that data dependencies
require. Where B must not start before A has ended, B uses a zero that XLA cannot fold:

    a, token = order_token(a)        token = 0, available when a is
    b = b + token                    what uses b waits for a
"""

import itertools
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..scopes import SYNC_SCOPE
from .buckets import MIB, Bucket, BucketPlan
from .collectives import Axis, joins_arrays, varying

_SMALL = 16_384  # elements of a tensor, on average over its bucket
LARGE_BYTES = MIB  # from which a tensor is sent as it is; to copy a smaller one takes an H100 less than 1 us
MAX_JOINED = 256  # arrays in one all-reduce: XLA's limit


def pack(bucket: Bucket, tensors: Mapping[str, jax.Array]) -> jax.Array:
    """Concatenates the tensors of a bucket to ``[elements]``; a bucket of one gives that tensor, uncopied."""
    if len(bucket.tensors) == 1:
        return tensors[bucket.tensors[0].name]
    return jnp.concatenate([tensors[tensor.name].reshape(-1) for tensor in bucket.tensors])


def unpack(bucket: Bucket, buffer: jax.Array | tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    """Splits a buffer, or the parts that ``pack_small`` gives, into the tensors of its bucket, by name."""
    if isinstance(buffer, tuple):
        return dict(ChainMap(*map(unpack, _parts(bucket), buffer)))
    if len(bucket.tensors) == 1:
        return {bucket.tensors[0].name: buffer}
    ends = itertools.accumulate(tensor.num_elements for tensor in bucket.tensors)
    pairs = zip(bucket.tensors, ends, strict=True)
    return {tensor.name: buffer[end - tensor.num_elements : end].reshape(tensor.shape) for tensor, end in pairs}


def pack_small(bucket: Bucket, tensors: Mapping[str, jax.Array]) -> jax.Array | tuple[jax.Array, ...]:
    """Gives the large tensors of a bucket as they are, and a buffer of the others; all packed if XLA cannot join so."""
    parts = _parts(bucket)
    return pack(bucket, tensors) if len(parts) > MAX_JOINED else tuple(pack(part, tensors) for part in parts)


def _parts(bucket: Bucket) -> list[Bucket]:
    """Each large tensor of a bucket by itself, in its order, and after them all small ones."""
    large = [Bucket((tensor,)) for tensor in bucket.tensors if tensor.num_bytes >= LARGE_BYTES]
    small = tuple(tensor for tensor in bucket.tensors if tensor.num_bytes < LARGE_BYTES)
    return [*large, Bucket(small)] if small else large


def sends_uncopied(plan: BucketPlan) -> bool:
    """Whether large gradients are sent as the backward writes them, and not packed."""
    return plan.kind == "all-reduce" and joins_arrays() and not plan.after_backward


class Wire(NamedTuple):
    """How a bucket travels; ``pack`` gives a buffer, or on GPUs the tuple of those that one call sends."""

    pack: Callable[[Bucket, Mapping[str, jax.Array]], Any]  # (bucket, gradients by name) -> a buffer
    send: Callable[[Any, str], Any]  # (buffer, key of the bucket) -> what this rank keeps of its sum over ranks
    unpack: Callable[[Bucket, Any], dict[str, jax.Array]]  # (bucket, what send gave) -> arrays by name
    unsent: Callable[[str, jax.Array], jax.Array]  # (name, gradient equal on all ranks) -> what is kept of its sum


class Means(NamedTuple):
    """Mean gradients."""

    grads: dict[str, jax.Array]  # what this rank keeps of each, by name
    squares: jax.Array | None = None  # their sum, if it was computed on the way; it holds the order of the buckets


@jax.named_scope(SYNC_SCOPE)
def reduce_buckets(
    plan: BucketPlan, wire: Wire, grads: Mapping[str, jax.Array], divisor: jax.Array | float, number: Any = None
) -> Means:
    """Sums this rank's gradients over ranks as planned, and divides them; those not planned are equal on all ranks.

    ``number`` is that of the micro-batch, where each one is reduced: to save memory, at most two buckets are in flight.
    """
    if plan.after_backward:
        grads = lax.optimization_barrier(dict(grads))
    chained, first = joins_arrays() and plan.kind == "all-reduce", jnp.int32(0 if number is None else number)
    totals: list[Any] = []
    packed_all, token = jnp.int32(0), first
    for index, bucket in enumerate(plan.buckets):
        buffer = wire.pack(bucket, grads)
        if number is not None and index >= 2:
            buffer, totals[index - 2] = lax.optimization_barrier((buffer, totals[index - 2]))
        # XLA would reduce equal buckets, such as biases of parallel branches, once. A number of its own for each
        # prevents that; so does a token that passes from bucket to bucket, which also keeps reductions in flight in
        # the order of the plan, in which their updates wait for them. On TPUs it would delay them.
        if chained:
            buffer, token = lax.optimization_barrier((buffer, token))
            zero = token - first
        else:
            buffer, zero = order_token(buffer, index + len(plan.buckets) * (0 if number is None else number))
        if not varying(zero):  # under check_vma, on jax 0.10, the results must not depend on it
            packed_all = zero if chained else packed_all + zero
        totals.append(wire.send(buffer, f"{index} {bucket.tensors[0].name}"))
    if plan.after_backward:
        totals = lax.optimization_barrier(totals)
    planned = {*plan.names}
    unsent = {name: wire.unsent(name, grad) for name, grad in grads.items() if name not in planned}
    means = {name: divide(total, divisor) for name, total in unsent.items()}
    squares = sum_of_squares(means.values())
    for bucket, total in zip(plan.buckets, totals, strict=True):
        # XLA fuses the sum of squares, which the norm needs anyway, with the update of the bucket's parameters.
        total, squares = lax.optimization_barrier((total, squares))  # noqa: PLW2901
        buffer = jax.tree.map(lambda part: divide(part, divisor, packed_all), total)
        mean = wire.unpack(bucket, buffer)
        summands = buffer if isinstance(buffer, tuple) else tuple(mean.values())
        # Of small tensors the first holds the order, and the rest share one sum: a kernel for each would cost more.
        if not isinstance(buffer, tuple) and len(mean) > 2 and buffer.size <= _SMALL * len(mean):
            summands = summands[0], buffer.reshape(-1)[summands[0].size :]
        squares += sum_of_squares(summands)
        means |= mean
    return Means(means, squares)


def divide(total: jax.Array, divisor: jax.Array | float, token: jax.Array | int = 0) -> jax.Array:
    """The one division: by the number of ranks and micro-batches, or by the total weight."""
    # Whatever promotion users allow themselves, a weight of one dtype divides gradients of another.
    with jax.numpy_dtype_promotion("standard"):
        return (wide(total) / (divisor + token)).astype(total.dtype)  # bfloat16 has no 514


def sum_of_squares(arrays: Iterable[jax.Array]) -> jax.Array:
    """Sums the squares of all elements of some arrays, at least in float32."""
    with jax.numpy_dtype_promotion("standard"):
        squares = [jnp.sum(jnp.square(wide(leaf))) for leaf in arrays]
        return sum(squares, start=jnp.zeros(()))


def wide(value: Any) -> jax.Array:
    """Converts to float32 or wider: 16-bit sums could overflow, and counts are exact up to 2^24."""
    dtype = jnp.dtype(jnp.result_type(value))
    is_counted = dtype.kind in "iu" and dtype.itemsize >= 4
    with jax.numpy_dtype_promotion("standard"):
        least = jax.dtypes.canonicalize_dtype("float64") if is_counted else jnp.float32
        return jnp.asarray(value, jnp.promote_types(dtype, least))


def check_grads(grads: Mapping[str, jax.Array], plan: BucketPlan, axis: Axis) -> None:
    """Refuses gradients whose shapes are not a plan's, or that autodiff has summed over ranks already."""
    shapes = {tensor.name: tensor.shape for bucket in plan.buckets for tensor in bucket.tensors}
    axes = {axis} if isinstance(axis, str) else set(axis)
    checks_vma = axes <= varying(lax.axis_index(axis))
    for name, grad in grads.items():
        if (planned := tuple(shapes.get(name, grad.shape))) != grad.shape:
            raise ValueError(f"gradient {name!r} (={[*grad.shape]}) must have the shape in plan (={[*planned]})")
        if checks_vma and grad.size and not axes <= varying(grad):
            raise ValueError(
                f"the gradient of {name!r} does not vary over {axis!r}: autodiff has summed it, it would be"
                f" {lax.axis_size(axis)} times too large; differentiate in jax.lax.pcast(params, {axis!r},"
                " to='varying'), leaf by leaf; pcast what is constant"
            )


def order_token(values: Any, number: jax.typing.ArrayLike = 0) -> tuple[Any, jax.Array]:
    """Gives arrays, to be used instead, and a scalar 0 available no earlier; other numbers keep equal ones apart."""
    values, hidden = lax.optimization_barrier((values, jnp.int32(number) if isinstance(number, int) else number))
    return values, hidden - number
