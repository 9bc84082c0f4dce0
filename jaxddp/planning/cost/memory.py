"""Bytes on each device: training state by ZeRO stage, buckets, gathered units, activations; how many devices it takes.

Per parameter a device holds p bytes of the parameter, g of its gradient, a of a sum over micro-batches in another
dtype, K of the optimizer: (p, g, K) is (4, 4, 8) with AdamW in float32, and (2, 2, 12) mixed, where K has the float32
master. A stage shards over N ranks what the one before it left whole:

    stage 0   p + g + a + K             stage 2   p + (g + a + K) / N
    stage 1   p + g + a + K / N         stage 3   (p + g + a + K) / N

From stage 2 on, what is summed over micro-batches is a shard only if every micro-batch is reduced and scattered. Summed
locally it stays whole: a, or g itself where there is no a.

Exactly, each leaf of n elements is flattened and padded to a multiple of N, one chunk a rank: ceil(n / N) elements, and
the sum of those takes the place of P / N. On top of the state come, for a while, full buckets of gradients, the units
whose parameters are gathered, and what the backward needs of the forward.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020 (figure 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..buckets import chunk_elements
from .checks import check_choice, check_count, check_not_negative, check_positive

STAGES = (0, 1, 2, 3)
Accumulate = Literal["shards", "full"]


class PerParameter(NamedTuple):
    """Bytes of the training state per parameter.

    Attributes:
        parameter: p.
        gradient: g.
        optimizer: K.
        accumulator: a; 0 if micro-batches are summed in the gradient itself, or there is only one.
    """

    parameter: int
    gradient: int
    optimizer: int
    accumulator: int = 0

    @property
    def total(self) -> int:
        """Of a device that holds everything."""
        return sum(self)


FP32 = PerParameter(4, 4, 8)
MIXED = PerParameter(2, 2, 12)
MIXED_ACCUMULATED = PerParameter(2, 2, 12, accumulator=4)


class StateBytes(NamedTuple):
    """Bytes of the training state on one device: numbers, or arrays of them.

    Attributes:
        parameters: Of the parameters.
        gradients: Of gradients that outlive their bucket, and of their sum over micro-batches.
        optimizer_state: Of the optimizer.
    """

    parameters: Any
    gradients: Any
    optimizer_state: Any

    @property
    def total(self) -> Any:
        """All three."""
        return self.parameters + self.gradients + self.optimizer_state


def state_bytes(
    num_params: Any,
    stage: int,
    num_ranks: Any = 1,
    per_parameter: PerParameter = FP32,
    accumulate: Accumulate = "shards",
) -> StateBytes:
    """Gives the training state on each of N ranks, without padding.

    Args:
        num_params: P; a number or an array.
        stage: 0 to 3.
        num_ranks: N; a number or an array.
        per_parameter: Bytes of each parameter.
        accumulate: What micro-batches are summed up in: ``"shards"``, or ``"full"`` gradients.

    Returns:
        The components.

    Raises:
        ValueError: If a number is out of range or an option unknown.

    Example:
        >>> [float(state_bytes(1, stage, 64, MIXED).total) for stage in STAGES]
        [16.0, 4.1875, 2.21875, 0.25]
    """
    check_not_negative(num_params=num_params)
    check_count(num_ranks=num_ranks)
    return _components(num_params, np.true_divide(num_params, num_ranks), stage, per_parameter, accumulate)


def cut_and_whole_bytes(
    num_params: Any, stage: int, per_parameter: PerParameter = FP32, accumulate: Accumulate = "shards"
) -> tuple[Any, Any]:
    """Gives what of the training state is spread over all ranks, and what every rank holds whole.

    Args:
        num_params: P.
        stage: 0 to 3.
        per_parameter: Bytes of each parameter.
        accumulate: As for ``state_bytes``.

    Returns:
        ``(bytes of all ranks together, bytes of each rank)``, as ``least_ranks`` wants them.

    Raises:
        ValueError: As ``state_bytes``.

    Example:
        >>> cut_and_whole_bytes(10, stage=1)
        (80, 80)
    """
    check_not_negative(num_params=num_params)
    whole = _components(num_params, 0, stage, per_parameter, accumulate).total
    return num_params * per_parameter.total - whole, whole


def exact_state_bytes(
    leaf_elements: Sequence[int],
    stage: int,
    num_ranks: int,
    per_parameter: PerParameter = FP32,
    accumulate: Accumulate = "shards",
    *,
    whole_elements: Sequence[int] = (),
) -> StateBytes:
    """Gives the training state on each of N ranks to the byte, padding included.

    Scalars that an optimizer keeps beside its moments, such as a count of steps, are not in it.

    Args:
        leaf_elements: Elements of each leaf that is cut; of a stack that is cut by rows, of each row.
        stage: 0 to 3.
        num_ranks: N.
        per_parameter: Bytes of each parameter.
        accumulate: As for ``state_bytes``.
        whole_elements: Elements of each leaf that no stage cuts.

    Returns:
        The components, whole numbers.

    Raises:
        ValueError: As ``state_bytes``.

    Example:
        >>> exact_state_bytes([10, 1], stage=3, num_ranks=4)
        StateBytes(parameters=16, gradients=16, optimizer_state=32)
    """
    check_count(num_ranks=num_ranks)
    check_not_negative(leaf_elements=[0, *leaf_elements], whole_elements=[0, *whole_elements])
    chunks = sum(chunk_elements(elements, num_ranks) for elements in leaf_elements)
    cut = _components(sum(leaf_elements), chunks, stage, per_parameter, accumulate)
    whole = _components(sum(whole_elements), sum(whole_elements), stage, per_parameter, accumulate)
    return StateBytes(*(sum(both) for both in zip(cut, whole, strict=True)))


def exact_bucket_bytes(leaf_elements: Sequence[int], num_ranks: int, element_bytes: int) -> int:
    """Gives the full buffer of a bucket that is reduced and scattered: N chunks of each of its leaves.

    Args:
        leaf_elements: Elements of each.
        num_ranks: N.
        element_bytes: Of what travels.

    Returns:
        Bytes.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> exact_bucket_bytes([105, 220], num_ranks=2, element_bytes=4)
        1304
    """
    check_count(num_ranks=num_ranks, element_bytes=element_bytes)
    check_not_negative(leaf_elements=[0, *leaf_elements])
    return num_ranks * element_bytes * sum(chunk_elements(elements, num_ranks) for elements in leaf_elements)


def gathered_bytes(unit_params: Sequence[int], element_bytes: float, num_units: int = 2, tp: int = 1) -> float:
    """Gives what is gathered at once where parameters are sharded: the unit in use, and those fetched ahead.

    Args:
        unit_params: Parameters of each unit, in the order of their use.
        element_bytes: Of what is gathered.
        num_units: How many, one in use included.
        tp: Tensor-parallel ranks, each of which gathers its part only.

    Returns:
        Bytes of the largest ``num_units`` neighbours.

    Raises:
        ValueError: If a number is out of range.
    """
    check_count(unit_params=unit_params, num_units=num_units, tp=tp)
    check_positive(element_bytes=element_bytes)
    starts = range(max(1, len(unit_params) - num_units + 1))
    return max(sum(unit_params[start : start + num_units]) for start in starts) * element_bytes / tp


def activation_bytes(
    tokens: Any, kept_per_token: float, kept_cut_per_token: float = 0, element_bytes: float = 2, tp: Any = 1
) -> Any:
    """Gives what the backward needs of the forward, nothing recomputed.

    Args:
        tokens: That a rank works on at once.
        kept_per_token: Elements that every tensor-parallel rank holds whole; see ``workload.py``.
        kept_cut_per_token: Elements of which each holds its part.
        element_bytes: Of an element.
        tp: Tensor-parallel ranks.

    Returns:
        Bytes, of the shape that ``tokens`` and ``tp`` broadcast to.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> float(activation_bytes(1, 126 * (16384 + 53248)))
        17547264.0
    """
    check_not_negative(tokens=tokens, kept_per_token=kept_per_token, kept_cut_per_token=kept_cut_per_token)
    check_positive(element_bytes=element_bytes)
    check_count(tp=tp)
    return np.multiply(tokens, kept_per_token + np.true_divide(kept_cut_per_token, tp)) * element_bytes


def least_ranks(cut_bytes: Any, whole_bytes: Any, capacity_bytes: Any) -> Any:
    """Gives the fewest ranks over which something fits: ``floor(cut / (capacity - whole)) + 1``.

    That is the least N with ``cut / N + whole < capacity``; there is none where the whole part alone is too large.

    Args:
        cut_bytes: Of all ranks together, spread evenly.
        whole_bytes: On each rank.
        capacity_bytes: Of each rank.

    Returns:
        N; inf where there is none.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> float(least_ranks(cut_bytes=3_517_578_215_424, whole_bytes=0, capacity_bytes=95e9))
        38.0
    """
    check_not_negative(cut_bytes=cut_bytes, whole_bytes=whole_bytes)
    check_positive(capacity_bytes=capacity_bytes)
    room = np.asarray(capacity_bytes, float) - whole_bytes
    return np.where(room > 0, np.floor(np.divide(cut_bytes, np.where(room > 0, room, 1.0))) + 1, np.inf)


def _components(full: Any, part: Any, stage: int, per_parameter: PerParameter, accumulate: Accumulate) -> StateBytes:
    """Takes ``full`` elements of what the stage leaves whole, ``part`` of what it shards."""
    check_choice(STAGES, stage=stage)
    check_choice(("shards", "full"), accumulate=accumulate)
    check_not_negative(per_parameter=per_parameter)
    p, g, k, a = per_parameter
    gradient = part if stage >= 2 else full
    summed = gradient if accumulate == "shards" else full
    return StateBytes(
        p * (part if stage >= 3 else full),
        g * (gradient if a else summed) + a * summed,
        k * (part if stage >= 1 else full),
    )
