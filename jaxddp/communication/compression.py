"""What travels: how a bucket's buffer becomes its sum over ranks.

=============== ================================= ============== ======================================================
name            what n elements travel as         calls          what is lost
=============== ================================= ============== ======================================================
``none``        themselves                        1              nothing
``noop``        nothing                           0              the other ranks' part: wrong training, and an exact
                                                                 baseline: exposed communication is the time of a step
                                                                 minus the time of the same step under ``noop``
``bf16``        n of 2 bytes                      1              all but 8 bits of each summand and of their sum
``fp16``        n of 2 bytes                      1              all but 11 bits, and what is below 6e-8 or above 65504
``powersgd(k)`` k (rows + columns) of a matrix,   2              nothing for ever: it is added to the next gradients
                itself of anything smaller
=============== ================================= ============== ======================================================

The two casts serve every strategy that plans buckets, all-reduces and reduce-scatters alike. ``powersgd`` needs whole
gradients, and a memory that goes from step to step: it serves those whose optimizer is whole, under ``Trainer``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax

from ..planning.buckets import Bucket, TensorSpec
from .buckets import pack, unpack
from .low_rank import factor_buckets, first_memory, is_worth_it, sum_by_factors


class Compression(NamedTuple):
    """How a buffer is summed over ranks.

    Attributes:
        name: For tables, and for ``make_compression``.
        sends: False if nothing is communicated.
        travel: ``(bucket, buffer, axis, memory, route, denominator) -> (what the rank keeps of the sum, memory)``;
            ``memory`` is what this rank remembers of tensors, by name, and what is returned are those that changed;
            ``denominator`` is what the sum will be divided by.
        wire: ``(bucket, elements of its buffer) -> (elements, dtype)`` of each buffer that travels for it.
        remember: Tensor ``->`` what is remembered of it before the first step, arrays of NumPy; None if nothing. The
            whole is None if nothing is ever remembered.
    """

    name: str
    sends: bool
    travel: Callable[[Bucket, jax.Array, str, Mapping[str, Any], Any, Any], tuple[jax.Array, Mapping[str, Any]]]
    wire: Callable[[Bucket, int], list[tuple[int, str]]]
    remember: Callable[[TensorSpec], Any] | None = None


none = Compression(
    "none",
    True,
    lambda bucket, buffer, axis, memory, route, denominator: (route.send(buffer, axis), {}),
    lambda bucket, num_elements: [(num_elements, bucket.dtype)],
)
noop = Compression(
    "noop",
    False,
    lambda bucket, buffer, axis, memory, route, denominator: (route.keep(buffer, axis), {}),
    lambda bucket, num_elements: [],
)


def _cast(name: str, dtype: str, *, divides: bool) -> Compression:
    def travel(
        bucket: Bucket, buffer: jax.Array, axis: str, memory: Mapping[str, Any], route: Any, denominator: Any
    ) -> tuple[jax.Array, Mapping[str, Any]]:
        divisor = lax.axis_size(axis) if divides else 1
        total = route.send((buffer / divisor).astype(dtype), axis)
        return total.astype(buffer.dtype) * divisor, {}

    return Compression(name, True, travel, lambda bucket, num_elements: [(num_elements, dtype)])


bf16 = _cast("bf16", "bfloat16", divides=False)
# Above 65504 a sum of float16 is infinite: divided first, it is no larger than the largest summand.
fp16 = _cast("fp16", "float16", divides=True)


def powersgd(rank: int, *, min_compression: float = 1.0) -> Compression:
    """Sends matrices as two thin factors, and what that leaves out with the gradients of the next step.

    Each bucket takes two all-reduces: the first factors of its matrices together with all that is smaller than its
    factors, as it is; then the second factors. Both are at least float32. A tensor of more than two dimensions is the
    matrix of its last dimension against all others.

    Each rank keeps the error, of the size of the gradients, and the second factors, in ``TrainState.memory``.

    What does not fit comes later, by up to min(rows, columns) / rank steps. SGD adds gradients up and loses little: the
    model ``byte`` at rank 4 was 0.6 % behind after 200 steps (validation loss, learning rate 0.1). Adam divides by how
    large gradients are, which those that come late and at once make larger: it was 13 % behind (AdamW, 0.001).

    Args:
        rank: Columns of the factors, that is the rank of the matrices they stand for.
        min_compression: How many times smaller factors must be than a matrix that is to travel as such; at least 1.

    Returns:
        The compression.

    Raises:
        ValueError: If a number is out of range.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank (={rank!r}) must be a positive integer")
    if not isinstance(min_compression, numbers.Real) or not 1 <= float(min_compression) < math.inf:
        raise ValueError(f"min_compression (={min_compression!r}) must be a finite number of at least 1")

    def travel(
        bucket: Bucket, buffer: jax.Array, axis: str, memory: Mapping[str, Any], route: Any, denominator: Any
    ) -> tuple[jax.Array, Mapping[str, Any]]:
        totals, remembered = sum_by_factors(
            unpack(bucket, buffer),
            memory,
            factor_buckets(bucket, rank, min_compression),
            lambda packed: route.send(packed, axis),
            lax.axis_size(axis),
            denominator,
        )
        return pack(bucket, totals), remembered

    def wire(bucket: Bucket, num_elements: int) -> list[tuple[int, str]]:
        factors = factor_buckets(bucket, rank, min_compression)
        return [(part.num_elements, part.dtype) for part in factors if part.tensors]

    def remember(tensor: TensorSpec) -> Any:
        return first_memory(tensor, rank) if is_worth_it(tensor.shape, rank, min_compression) else None

    return Compression(f"powersgd:{rank}", True, travel, wire, remember)


def make_compression(name: str) -> Compression:
    """Makes a compression by name.

    Args:
        name: ``none``, ``noop``, ``bf16``, ``fp16``, or ``powersgd:`` and its rank.

    Returns:
        The compression.

    Raises:
        ValueError: If there is none of that name, or the rank is out of range.

    Example:
        >>> make_compression("powersgd:4").name
        'powersgd:4'
    """
    simple = {one.name: one for one in (none, noop, bf16, fp16)}
    if name in simple:
        return simple[name]
    kind, _, rank = name.partition(":")
    if kind != "powersgd":
        raise ValueError(f"unknown compression {name!r}: one of {', '.join(simple)}, powersgd:RANK")
    return powersgd(int(rank) if rank.isdecimal() else rank)  # type: ignore[arg-type]  # refused there


def check_forgets(compression: Compression, where: str) -> None:
    """Refuses a compression that needs a memory where there is none.

    Args:
        compression: What travels.
        where: Where that is, and what to do instead.

    Raises:
        ValueError: If it remembers.
    """
    if compression.remember is not None:
        raise ValueError(f"compression (={compression.name!r}) must not remember anything {where}")
