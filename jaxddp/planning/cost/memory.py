"""Bytes per device (training state by ZeRO stage, buckets, gathered units, activations), and how many devices fit.

Per parameter a device holds p bytes of the parameter, g of its gradient, a of an accumulated gradient in another dtype,
and K of optimizer state: (p, g, K) is (4, 4, 8) with AdamW in float32, and (2, 2, 12) in mixed precision, where K
includes the float32 master. Each stage shards one more component over N ranks:

    stage 0   p + g + a + K             stage 2   p + (g + a + K) / N
    stage 1   p + g + a + K / N         stage 3   (p + g + a + K) / N

``Trainer(compute_dtype=...)`` casts masters when it gathers them at stage 3, so there it holds (4, 2, 8) instead of the
paper's (2, 2, 12) (``TrainingJob.held``).

From stage 2 on, accumulated gradients are shards only if every micro-batch is reduce-scattered. Otherwise a (or g, if
there is no a) stays full.

To the byte, each leaf of n elements is flattened and padded to N chunks of ceil(n / N) elements; their sum replaces
P / N. Temporary memory comes on top: full gradient buckets, gathered units and activations.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020 (figure 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ...arguments import check_kind
from ...communication.buckets import chunk_elements
from .checks import check_choice, check_count, check_not_negative, check_positive, check_size

STAGES = (0, 1, 2, 3)
Accumulate = Literal["shards", "full"]


class PerParameter(NamedTuple):
    """Bytes of training state per parameter.

    Attributes:
        parameter: p.
        gradient: g.
        optimizer: K.
        accumulator: a; 0 if micro-batches accumulate in the gradient itself, or there is only one.
    """

    parameter: int
    gradient: int
    optimizer: int
    accumulator: int = 0

    @property
    def total(self) -> int:
        """Bytes without sharding."""
        return sum(self)


FP32 = PerParameter(4, 4, 8)
MIXED = PerParameter(2, 2, 12)
MIXED_ACCUMULATED = PerParameter(2, 2, 12, accumulator=4)


class StateBytes(NamedTuple):
    """Bytes of the training state on one device; numbers or arrays.

    Attributes:
        gradients: Gradients that outlive their bucket, with the accumulator.
    """

    parameters: Any
    gradients: Any
    optimizer_state: Any

    @property
    def total(self) -> Any:
        """Sum of all three."""
        return self.parameters + self.gradients + self.optimizer_state


def state_bytes(
    num_params: Any,
    stage: int,
    num_ranks: Any = 1,
    per_parameter: PerParameter = FP32,
    accumulate: Accumulate = "shards",
) -> StateBytes:
    """Computes the training state on each of N ranks, without padding.

    Micro-batches accumulate in ``"shards"`` or in ``"full"`` gradients. P and N may be arrays.

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
    """Splits the training state into sharded and replicated bytes; the arguments are those of ``state_bytes``.

    Returns:
        ``(sharded bytes of all ranks together, replicated bytes of each rank)``, for ``least_ranks``.

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
    """Computes the training state on each of N ranks to the byte, padding included.

    Optimizer scalars such as a step count are not included.

    ``leaf_elements`` are those of each sharded leaf, or of each row of a leaf that is sharded by rows;
    ``whole_elements`` those of each leaf that stays replicated at every stage. ``accumulate`` is as for
    ``state_bytes``.

    Example:
        >>> exact_state_bytes([10, 1], stage=3, num_ranks=4)
        StateBytes(parameters=16, gradients=16, optimizer_state=32)
    """
    check_count(num_ranks=num_ranks)
    check_kind("leaf_elements", leaf_elements, Sequence, "a sequence of numbers")
    check_kind("whole_elements", whole_elements, Sequence, "a sequence of numbers")
    check_size(leaf_elements=[0, *leaf_elements], whole_elements=[0, *whole_elements])
    chunks = sum(chunk_elements(elements, num_ranks) for elements in leaf_elements)
    cut = _components(sum(leaf_elements), chunks, stage, per_parameter, accumulate)
    whole = _components(sum(whole_elements), sum(whole_elements), stage, per_parameter, accumulate)
    return StateBytes(*(sum(both) for both in zip(cut, whole, strict=True)))


def exact_bucket_bytes(leaf_elements: Sequence[int], num_ranks: int, element_bytes: int) -> int:
    """Computes the full buffer of a reduce-scattered bucket: N chunks of each leaf.

    Example:
        >>> exact_bucket_bytes([105, 220], num_ranks=2, element_bytes=4)
        1304
    """
    check_count(num_ranks=num_ranks, element_bytes=element_bytes)
    check_not_negative(leaf_elements=[0, *leaf_elements])
    return num_ranks * element_bytes * sum(chunk_elements(elements, num_ranks) for elements in leaf_elements)


def gathered_bytes(unit_params: Sequence[int], element_bytes: float, num_units: int = 2, tp: int = 1) -> float:
    """Computes what is gathered at once at stage 3: the ``num_units`` largest consecutive units.

    Each tensor-parallel rank gathers its own part.
    """
    check_count(unit_params=unit_params, num_units=num_units, tp=tp)
    check_positive(element_bytes=element_bytes)
    starts = range(max(1, len(unit_params) - num_units + 1))
    return max(sum(unit_params[start : start + num_units]) for start in starts) * element_bytes / tp


def activation_bytes(
    tokens: Any, kept_per_token: float, kept_cut_per_token: float = 0, element_bytes: float = 2, tp: Any = 1
) -> Any:
    """Computes what the backward needs from the forward, without recomputation.

    ``kept_cut_per_token`` is split over tensor-parallel ranks, ``kept_per_token`` is not; see ``workload.py``.

    Example:
        >>> float(activation_bytes(1, 126 * (16384 + 53248)))
        17547264.0
    """
    check_not_negative(tokens=tokens, kept_per_token=kept_per_token, kept_cut_per_token=kept_cut_per_token)
    check_positive(element_bytes=element_bytes)
    check_count(tp=tp)
    return np.multiply(tokens, kept_per_token + np.true_divide(kept_cut_per_token, tp)) * element_bytes


def least_ranks(cut_bytes: Any, whole_bytes: Any, capacity_bytes: Any) -> Any:
    """Computes the smallest N with ``cut / N + whole < capacity``: ``floor(cut / (capacity - whole)) + 1``.

    ``cut_bytes`` are those of all ranks together, ``whole_bytes`` those on each rank; inf if these alone do not fit.

    Example:
        >>> float(least_ranks(cut_bytes=3_517_578_215_424, whole_bytes=0, capacity_bytes=95e9))
        38.0
    """
    check_not_negative(cut_bytes=cut_bytes, whole_bytes=whole_bytes)
    check_positive(capacity_bytes=capacity_bytes)
    room = np.asarray(capacity_bytes, float) - whole_bytes
    return np.where(room > 0, np.floor(np.divide(cut_bytes, np.where(room > 0, room, 1.0))) + 1, np.inf)


def _components(full: Any, part: Any, stage: int, per_parameter: PerParameter, accumulate: Accumulate) -> StateBytes:
    """Bytes for ``full`` elements of replicated components and ``part`` elements of sharded ones."""
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
