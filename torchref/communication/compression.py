"""Gradient compression: how a bucket's buffer becomes its sum over ranks.

=============== ================================= ============== ======================================================
name            n elements are sent as            calls          what is lost
=============== ================================= ============== ======================================================
``none``        n elements                        1              nothing
``noop``        nothing                           0              the other ranks' gradients. Training is wrong; exposed
                                                                 communication is the time of a step minus the time of
                                                                 the same step under ``noop``
``bf16``        n of 2 bytes                      1              all but 8 bits of each summand and of each sum
``fp16``        n of 2 bytes                      1              all but 11 bits, and what is below 6e-8 or above 65504
``powersgd(k)`` k (rows + columns) for a matrix,  2              nothing permanently; the error is fed back at the next
                n for anything smaller                           step
=============== ================================= ============== ======================================================

The two casts serve the strategies in ``ddp/``, ``ZeRO1`` and ``ZeRO2``. ``powersgd`` needs full gradients, so it serves
only those in ``ddp/``. It also needs the denominator of the sums, so its reductions start after the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from jaxddp.arguments import check_integer, check_kind, is_number
from jaxddp.communication.buckets import Bucket, TensorSpec

from .buffers import unpack
from .collectives import Pending, all_reduce
from .low_rank import Memory, factor_buckets, first_memory, is_worth_it, sum_by_factors


class Compression(NamedTuple):
    """How a buffer is summed over ranks.

    Attributes:
        name: For tables.
        sends: False if nothing is communicated.
        reduce: ``(buffer, group, async_op, reduce, divisor) -> (what this rank keeps of the sum, handle)``. ``reduce``
            is a ``reduction.Reduce``; ``divisor`` is about what the sum will be divided by, None if unknown. Wait for
            the handle, if it is not None, before using the result. The buffer may be overwritten.
        wire_buffers: ``(bucket, elements of its buffer) -> (elements, dtype)`` of each buffer that is sent for it.
        init_state: Tensor ``->`` its state before the first step, or None. None for a stateless compression.
        finish: ``(bucket, buffer, group, memory, denominator) ->`` the changed part of ``memory``. Sums the buffer in
            place, undivided, once the denominator is known. None if ``reduce`` sums.
        needs_divisor: Whether ``reduce`` must know its divisor, within a few powers of two.
    """

    name: str
    sends: bool
    reduce: Callable[..., tuple[torch.Tensor, Any]]
    wire_buffers: Callable[[Bucket, int], list[tuple[int, str]]]
    init_state: Callable[[TensorSpec], Memory | None] | None = None
    finish: Callable[[Bucket, torch.Tensor, Any, Mapping[str, Memory], float], Mapping[str, Memory]] | None = None
    needs_divisor: bool = False


none = Compression(
    "none",
    True,
    lambda buffer, group, async_op, reduce, divisor=None: reduce.send(buffer, group, async_op),
    lambda bucket, num_elements: [(num_elements, bucket.dtype)],
)
noop = Compression(
    "noop",
    False,
    lambda buffer, group, async_op, reduce, divisor=None: (reduce.keep(buffer, group), None),
    lambda bucket, num_elements: [],
)


def _cast(name: str, dtype: torch.dtype, *, divides: bool) -> Compression:
    def reduce_cast(
        buffer: torch.Tensor, group: Any, async_op: bool, reduce: Any, divisor: float | None = None
    ) -> tuple[torch.Tensor, Any]:
        divisor = (divisor or dist.get_world_size(group)) if divides else 1
        sent = (buffer / divisor).to(dtype)
        total, work = reduce.send(sent, group, async_op)
        kept = reduce.keep(buffer, group)
        works = [] if work is None else [work]
        return kept, Pending(works, partial(_cast_back, sent, total, kept, divisor))

    dtype_name = str(dtype).removeprefix("torch.")
    return Compression(
        name, True, reduce_cast, lambda bucket, num_elements: [(num_elements, dtype_name)], needs_divisor=divides
    )


def _cast_back(sent: torch.Tensor, total: torch.Tensor, kept: torch.Tensor, factor: float) -> None:
    del sent  # an argument only to keep it alive until the collective has read it
    kept.copy_(total).mul_(factor)


bf16 = _cast("bf16", torch.bfloat16, divides=False)
# A float16 sum above 65504 is infinite. Divided first, by about all that it will be divided by, it is the mean.
fp16 = _cast("fp16", torch.float16, divides=True)


def powersgd(rank: int, *, min_compression: float = 1.0) -> Compression:
    """Sends matrices as two thin factors, and feeds the error back into the next step's gradients.

    Each bucket takes two all-reduces: the first carries the first factors of its matrices and all tensors that are
    smaller than their factors; the second carries the second factors. Both are at least float32. A tensor of more than
    two dimensions is factored as the matrix of its first dimension against all others.

    Each rank keeps the error, of the size of the gradients, and the second factors, in ``DataParallel.memory``.

    Args:
        rank: Columns of the factors, which is the rank of the matrices they represent.
        min_compression: How many times smaller than a matrix its factors must be to be sent instead; at least 1.

    Raises:
        ValueError: If a number is out of range.
    """
    rank = check_integer("rank", rank)
    if not is_number(min_compression) or not 1 <= min_compression < math.inf:
        raise ValueError(f"min_compression (={min_compression!r}) must be a finite number of at least 1")

    def finish(
        bucket: Bucket, buffer: torch.Tensor, group: Any, memory: Mapping[str, Memory], denominator: float
    ) -> Mapping[str, Memory]:
        def send(packed: torch.Tensor) -> torch.Tensor:
            all_reduce(packed, group)
            return packed

        factors = factor_buckets(bucket, rank, min_compression)
        totals, changed = sum_by_factors(
            unpack(bucket, buffer), memory, factors, send, dist.get_world_size(group), denominator
        )
        for name, view in unpack(bucket, buffer).items():
            view.copy_(totals[name])
        return changed

    def wire_buffers(bucket: Bucket, num_elements: int) -> list[tuple[int, str]]:
        factors = factor_buckets(bucket, rank, min_compression)
        return [(part.num_elements, part.dtype) for part in factors if part.tensors]

    def init_state(tensor: TensorSpec) -> Memory | None:
        return first_memory(tensor, rank) if is_worth_it(tensor.shape, rank, min_compression) else None

    return Compression(f"powersgd:{rank}", True, noop.reduce, wire_buffers, init_state, finish)


def make_compression(name: str) -> Compression:
    """Makes a compression by name: ``none``, ``noop``, ``bf16``, ``fp16``, or ``powersgd:`` and its rank.

    Raises:
        ValueError: If there is none of that name, or the rank is out of range.

    Example:
        >>> make_compression("powersgd:4").name
        'powersgd:4'
    """
    check_kind("compression", name, str, "the name of a compression")
    simple = {one.name: one for one in (none, noop, bf16, fp16)}
    if name in simple:
        return simple[name]
    kind, _, rank = name.partition(":")
    if kind != "powersgd":
        raise ValueError(f"unknown compression {name!r}: one of {', '.join(simple)}, powersgd:RANK")
    return powersgd(int(rank) if rank.isdecimal() else rank)  # type: ignore[arg-type]  # refused there


def check_stateless(compression: Compression, where: str) -> None:
    """Refuses a compression with state where nothing carries the state from step to step.

    ``where`` is the place, and what to do instead; it ends the message.

    Raises:
        ValueError: If it has state.
    """
    if compression.init_state is not None:
        raise ValueError(f"compression (={compression.name!r}) must be stateless {where}")
