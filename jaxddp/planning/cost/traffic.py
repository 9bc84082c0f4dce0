"""What a strategy sends: bytes per rank and optimizer step, and how often parameters are gathered.

In units of (N-1)/N elements per parameter, over A micro-batches, a reduce-scatter or an all-gather of everything is 1
and an all-reduce is both:

    strategy                                        reduced every micro-batch    summed locally, reduced once
    naive, flat, overlapped, bucketed               2 A                          2
    zero1, zero2: reduce-scatter + all-gather       A + 1                        2 (zero2 gives up its gradient shards)
    zero3: gathered twice a micro-batch             3 A                          2 A + 1 (likewise)
    zero3, gathered once and kept over the step     A + 1                        2
    sharded_optimizer: all-reduce + broadcasts      2 A + 1                      3

The bytes of a gradient and of a parameter may differ, so reductions and gatherings are counted apart. Stage 3 need not
drop the last of L layers between its forward and its backward, which uses it at once: A (2 L - 1) gatherings. If the
first layer is kept as well from one micro-batch's backward to the next one's forward, it is 2 A (L - 1) + 1.

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
    """What a rank sends in one optimizer step, in units of (N-1)/N elements per parameter.

    Attributes:
        gradients: For gradients.
        parameters: For parameters.
    """

    gradients: Any
    parameters: Any

    @property
    def total(self) -> Any:
        """Both."""
        return self.gradients + self.parameters


def traffic(strategy: str, num_microbatches: Any = 1, reduce: Reduce = "every", *, reshard: bool = True) -> Traffic:
    """Counts what a strategy sends.

    Args:
        strategy: One of ``STRATEGIES``; ``"sharded_optimizer"`` all-reduces gradients and broadcasts parameters.
        num_microbatches: A; a number or an array.
        reduce: Gradients of ``"every"`` micro-batch, or their sum ``"once"``.
        reshard: Whether zero3 drops what it has gathered after each use.

    Returns:
        The units.

    Raises:
        ValueError: If the strategy or an option is unknown, or A is no count.

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
    """Turns units into bytes.

    Args:
        traffic: What is sent.
        num_params: Parameters of which each rank has a gradient.
        num_ranks: N.
        gradient_bytes: Of an element of what is reduced.
        parameter_bytes: Of an element of what is gathered.

    Returns:
        Bytes that each rank sends per optimizer step.

    Raises:
        ValueError: If a number is out of range.
    """
    check_not_negative(num_params=num_params, gradient_bytes=gradient_bytes, parameter_bytes=parameter_bytes)
    check_count(num_ranks=num_ranks)
    units = traffic.gradients * gradient_bytes + traffic.parameters * parameter_bytes
    return units * np.multiply(num_params, np.subtract(num_ranks, 1) / np.asarray(num_ranks))


def num_gathers(num_layers: Any, num_microbatches: Any = 1, *, keep_last: bool = True, keep_first: bool = False) -> Any:
    """Counts the layers that zero3 gathers in one optimizer step.

    Args:
        num_layers: L; a number or an array.
        num_microbatches: A.
        keep_last: Whether the last layer stays between its forward and its backward.
        keep_first: Whether the first stays between a micro-batch's backward and the next one's forward.

    Returns:
        Gatherings; as many layers are dropped.

    Raises:
        ValueError: If a number is no count.

    Example:
        >>> int(num_gathers(32)), int(num_gathers(32, 4)), int(num_gathers(32, 4, keep_first=True))
        (63, 252, 249)
    """
    check_count(num_layers=num_layers, num_microbatches=num_microbatches)
    layers, batches = np.asarray(num_layers), np.asarray(num_microbatches)
    saved_by_last = batches * keep_last
    saved_by_first = (batches - 1) * keep_first
    return 2 * batches * layers - saved_by_last - saved_by_first
