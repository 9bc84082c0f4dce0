"""The memory that the assignment report measured, beside what is found here, with the reason for each difference.

The report measured data parallelism with buckets, and an optimizer that deals out whole tensors by index: one process
on 2 GPUs, seed_xl, 32 sequences a step, the allocator's peak of each phase. Their counterparts are ``bucketed`` and
``zero1``. The report's errors are worked out in ``docs/published-figures.md``, rows S.optim_state and S.peaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxddp.instruments.memory import StepMemory
from jaxddp.models import SIZES
from jaxddp.planning.cost.workload import transformer

from ..harness.values import MIB

NUM_RANKS, SEQUENCES = 2, 32
# MiB: peaks after init, before the step and after it; optimizer state.
BASELINE = (654.659, 4786.07, 2764.18, 1305.38)
SHARDED = (1998.94, 6112.23, 3487.62, 711.281)
_NAMES = ("after init", "before the step", "after the step", "optimizer state")


class Figure(NamedTuple):
    """One figure of the assignment report.

    Attributes:
        says_mib: The report's figure, in MiB.
        corrected: Without what does not belong to it, in bytes; None if all of it does.
        here: What is found here, in bytes.
        why: Why the two differ.
    """

    name: str
    says_mib: float
    corrected: float | None
    here: int
    why: str

    @property
    def comparable(self) -> float:
        """The figure as corrected, or as it is, in bytes."""
        return self.says_mib * MIB if self.corrected is None else self.corrected


def figures(strategy: str, found: StepMemory) -> list[Figure]:
    """Compares the report's figures with the compiled step of their counterpart; none of other strategies."""
    if strategy not in ("bucketed", "zero1"):
        return []
    params, state = found.after_init.parameters, found.after_init.optimizer_state
    here = (found.after_init.total, found.before_update.total, found.after_step.total, state)
    corrected: Sequence[float | None] = [None] * len(_NAMES)
    if strategy == "bucketed":
        kind, says = "baseline", BASELINE
        why = (
            f"optax makes the moments at once, PyTorch in its first step: without them here {_mib(params)}",
            "not itemised by the report; PyTorch saves what each operation needs, XLA computes the cheap again",
            "16 bytes a parameter, and in PyTorch logits and copies of the largest tensor; XLA updates in place",
            "they do not",
        )
    else:
        left = 2 * params  # model and buckets of the variant measured before; as large as the whole optimizer state
        kind, says = "sharded", SHARDED
        corrected = [*(peak * MIB - left for peak in SHARDED[:3]), left / NUM_RANKS]
        why = (
            f"2 x {_mib(params)}, model and buckets of the variant measured before, still allocated; moments as above",
            "the same, and activations as above",
            "the same; here all buckets are in flight as the backward ends, and their shards lie beside them",
            f"tensors dealt by index: both vocabulary matrices on rank 0, {dealt_by_index() / left:.4f} of it;"
            f" leaf by leaf it is {state / left:.4f}",
        )
    of_each = zip(_NAMES, says, corrected, here, why, strict=True)
    return [Figure(f"{kind}, {name}", mib, right, ours, reason) for name, mib, right, ours, reason in of_each]


def dealt_by_index() -> int:
    """Bytes of optimizer state on the rank that has most of it, if tensors are dealt out by index.

    Example:
        >>> dealt_by_index() / MIB
        711.28125
    """
    elements = transformer(**dataclasses.asdict(SIZES["seed_xl"])).tensor_elements
    return 8 * max(sum(elements[rank::NUM_RANKS]) for rank in range(NUM_RANKS))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.2f}"
