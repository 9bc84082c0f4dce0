"""What travels: how a bucket's buffer becomes its sum over ranks.

=============== ================================= ============== ======================================================
name            what n elements travel as         calls          what is lost
=============== ================================= ============== ======================================================
``none``        themselves                        1              nothing
``noop``        nothing                           0              the other ranks' part: wrong training, and an exact
                                                                 baseline: exposed communication is the time of a step
                                                                 minus the time of the same step under ``noop``
``bf16``        n of 2 bytes                      1              all but 8 bits of each summand and of each sum
``fp16``        n of 2 bytes                      1              all but 11 bits, and what is below 6e-8 or above 65504
``powersgd(k)`` k (rows + columns) of a matrix,   2              nothing for ever: it is added to the next gradients
                itself of anything smaller
=============== ================================= ============== ======================================================

The two casts serve the strategies of ``ddp/``, ``ZeRO1`` and ``ZeRO2``; ``powersgd``, which needs whole gradients,
those of ``ddp/``. It has to know by what sums are divided, so it begins when the backward has ended.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from jaxddp.planning.buckets import Bucket, TensorSpec

from .buckets import unpack
from .collectives import all_reduce
from .low_rank import Memory, factor_buckets, first_memory, is_worth_it, sum_by_factors
from .pending import Pending


class Compression(NamedTuple):
    """How a buffer is summed over ranks.

    Attributes:
        name: For tables.
        sends: False if nothing is communicated.
        travel: ``(buffer, group, async_op, route) -> (what the rank keeps of the sum, handle)``; what is kept is there
            when the handle has been waited for, at once if it is None. The buffer may be overwritten.
        wire: ``(bucket, elements of its buffer) -> (elements, dtype)`` of each buffer that travels for it.
        remember: Tensor ``->`` what is remembered of it before the first step; None if nothing. The whole is None if
            nothing is ever remembered.
        finish: ``(bucket, buffer, group, memory, denominator) -> what changed of the memory``: the sums that had to
            wait for their denominator, in place, and undivided. None if ``travel`` sums.
    """

    name: str
    sends: bool
    travel: Callable[[torch.Tensor, Any, bool, Any], tuple[torch.Tensor, Any]]
    wire: Callable[[Bucket, int], list[tuple[int, str]]]
    remember: Callable[[TensorSpec], Memory | None] | None = None
    finish: Callable[[Bucket, torch.Tensor, Any, Mapping[str, Memory], float], Mapping[str, Memory]] | None = None


none = Compression(
    "none",
    True,
    lambda buffer, group, async_op, route: route.send(buffer, group, async_op),
    lambda bucket, num_elements: [(num_elements, bucket.dtype)],
)
noop = Compression(
    "noop",
    False,
    lambda buffer, group, async_op, route: (route.keep(buffer, group), None),
    lambda bucket, num_elements: [],
)


def _cast(name: str, dtype: torch.dtype, *, divides: bool) -> Compression:
    def travel(buffer: torch.Tensor, group: Any, async_op: bool, route: Any) -> tuple[torch.Tensor, Any]:
        divisor = dist.get_world_size(group) if divides else 1
        sent = (buffer / divisor).to(dtype)
        total, work = route.send(sent, group, async_op)
        kept = route.keep(buffer, group)
        works = [] if work is None else [work]
        return kept, Pending(works, partial(_cast_back, sent, total, kept, divisor))

    of_dtype = str(dtype).removeprefix("torch.")
    return Compression(name, True, travel, lambda bucket, num_elements: [(num_elements, of_dtype)])


def _cast_back(sent: torch.Tensor, total: torch.Tensor, kept: torch.Tensor, factor: int) -> None:
    del sent  # until now it had to stay: it was being read
    kept.copy_(total).mul_(factor)


bf16 = _cast("bf16", torch.bfloat16, divides=False)
# Above 65504 a sum of float16 is infinite: divided first, it is no larger than the largest summand.
fp16 = _cast("fp16", torch.float16, divides=True)


def powersgd(rank: int, *, min_compression: float = 1.0) -> Compression:
    """Sends matrices as two thin factors, and what that leaves out with the gradients of the next step.

    Each bucket takes two all-reduces: the first factors of its matrices together with all that is smaller than its
    factors, as it is; then the second factors. Both are at least float32. A tensor of more than two dimensions is the
    matrix of its first dimension against all others.

    Each rank keeps the error, of the size of the gradients, and the second factors, in ``DataParallel.memory``.

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

    def wire(bucket: Bucket, num_elements: int) -> list[tuple[int, str]]:
        factors = factor_buckets(bucket, rank, min_compression)
        return [(part.num_elements, part.dtype) for part in factors if part.tensors]

    def remember(tensor: TensorSpec) -> Memory | None:
        return first_memory(tensor, rank) if is_worth_it(tensor.shape, rank, min_compression) else None

    return Compression(f"powersgd:{rank}", True, noop.travel, wire, remember, finish)


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
