"""Bytes that a rank sends per optimizer step, by strategy.

In units of (N-1)/N elements per parameter, over A micro-batches; a reduce-scatter or an all-gather of everything counts
1 and an all-reduce 2:

    strategy                                        reduced every micro-batch    accumulated, reduced once
    naive, flat, overlapped, bucketed               2 A                          2
    zero1, zero2: reduce-scatter + all-gather       A + 1                        2 (zero2 then holds full gradients)
    zero3: gathered twice per micro-batch           3 A                          2 A + 1 (holds full gradients)
    zero3, gathered once and kept for the step      A + 1                        2
    sharded_optimizer: all-reduce + broadcasts      2 A + 1                      3

Gradients and parameters may have different dtypes, so they are counted apart. Stage 3 may keep the last of L layers
between its forward and backward, which uses it at once: A (2 L - 1) gathers.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020 (section 7).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from .checks import check_choice, check_count, check_not_negative

DATA_PARALLEL = ("naive", "flat", "overlapped", "bucketed")
STRATEGIES = (*DATA_PARALLEL, "zero1", "zero2", "zero3", "sharded_optimizer")
Reduce = Literal["every", "once"]


class Traffic(NamedTuple):
    """What a rank sends in one optimizer step, in units of (N-1)/N elements per parameter."""

    gradients: Any
    parameters: Any

    @property
    def total(self) -> Any:
        """Gradients and parameters."""
        return self.gradients + self.parameters


def traffic(strategy: str, num_microbatches: Any = 1, reduce: Reduce = "every", *, reshard: bool = True) -> Traffic:
    """Counts what a strategy sends.

    Args:
        strategy: One of ``STRATEGIES``; ``"sharded_optimizer"`` all-reduces gradients and broadcasts parameters.
        num_microbatches: A; a number or an array.
        reduce: Whether ``"every"`` micro-batch is reduced, or their sum ``"once"``.
        reshard: Whether zero3 drops gathered parameters after each use.

    Raises:
        ValueError: If the strategy or an option is unknown, or A is not a positive whole number.

    Example:
        >>> [int(traffic(name).total) for name in ("bucketed", "zero1", "zero2", "zero3", "sharded_optimizer")]
        [2, 2, 2, 3, 3]
    """
    check_choice(STRATEGIES, strategy=strategy)
    check_choice(("every", "once"), reduce=reduce)
    check_count(num_microbatches=num_microbatches)
    times = np.asarray(num_microbatches if reduce == "every" else 1)
    if strategy in DATA_PARALLEL:
        return Traffic(2 * times, 0 * times)
    if strategy == "sharded_optimizer":
        return Traffic(2 * times, 1 + 0 * times)
    gathered = 2 * np.asarray(num_microbatches) if strategy == "zero3" and reshard else 1 + 0 * times
    return Traffic(times, gathered)


def sent_bytes(
    traffic: Traffic, num_params: Any, num_ranks: Any, gradient_bytes: float = 4, parameter_bytes: float = 4
) -> Any:
    """Computes the bytes that each rank sends per optimizer step.

    ``gradient_bytes`` and ``parameter_bytes`` are per element on the wire.
    """
    check_not_negative(num_params=num_params, gradient_bytes=gradient_bytes, parameter_bytes=parameter_bytes)
    check_count(num_ranks=num_ranks)
    units = traffic.gradients * gradient_bytes + traffic.parameters * parameter_bytes
    return units * np.multiply(num_params, np.subtract(num_ranks, 1) / np.asarray(num_ranks))
