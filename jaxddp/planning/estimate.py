"""How long a data-parallel step takes, by formulas: computing at a chip's rates, and the communication that it exposes.

    forward     products at the rate of their shapes, or as long as reading and writing them takes; attention; what
                memory-bound kernels move; a gap per kernel
    backward    twice the forward, five attention products for two, and what checkpointing computes again
    optimizer   bytes of AdamW's update: 32 a parameter in one kernel, 132 operation by operation
    exposed     naive, flat               all-reduces after the backward
                overlapped, bucketed      what the backward does not hide, and the last bucket
                zero1, zero2              the same with reduce-scatters, and the all-gather of the update
                sharded_optimizer         as naive, and broadcasts of the update
                zero3                     the first unit's gather, what neither pass hides, and the last reduce-scatter

Without compilation each operation is a kernel that the host launches, in 5 us (XLA's first estimate): a pass takes at
least its launches. What is left out: clocks that fall under load, kernels that share the chip with collectives, ranks
that wait for the slowest, and the input pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..communication.buckets import DEFAULT_BUCKET_MB, MIB
from ..network import Network
from .chips import Chip
from .formulas import DATA_PARALLEL
from .products import attention_rate, kernel_s, memory_rate, product_rate
from .workload import Workload

_HOST_LAUNCH_S = 5e-6
_UPDATE_BYTES = (32, 132)  # AdamW reads and writes parameter and moments in float32, reads the gradient, and its norm
_KERNELS_OF_A_BLOCK = (12, 45)
_UPDATE_KERNELS = (1, 15)
_LOGITS_PASSES = 3  # the loss reads the logits, and reads and writes them in float32


class StepTime(NamedTuple):
    """Seconds of a step by part."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        """The step."""
        return sum(self)


@dataclass(frozen=True)
class Run:
    """A data-parallel training run on one kind of chip.

    Attributes:
        chip: With its rates: ``as_measured``, or published peaks.
        products: The dtype in which products are computed, as in ``Chip.flops_per_s``.
        tokens: Of a rank in one micro-batch.
        strategy: One of ``formulas.STRATEGIES``.
        bucket_mb: MiB of a bucket.
        element_bytes: Of an activation, and of a gathered parameter.
        gradient_bytes: Of a gradient on the wire.
        is_compiled: Whether operations are fused, and launched without the host.
    """

    workload: Workload
    chip: Chip
    products: str
    network: Network
    num_ranks: int
    tokens: int
    num_microbatches: int = 1
    strategy: str = "bucketed"
    bucket_mb: float = DEFAULT_BUCKET_MB
    element_bytes: int = 2
    gradient_bytes: int = 4
    is_compiled: bool = True

    @property
    def num_layers(self) -> int:
        """Blocks, or other units that are computed one after the other."""
        return max(1, len(self.workload.unit_tensors) - 2)


def estimate(run: Run) -> StepTime:
    """Estimates one step.

    Example:
        >>> from ..network import measured
        >>> from .chips import CHIPS
        >>> from .products import as_measured
        >>> from .workload import transformer
        >>> model = transformer(32_000, 4096, 4096, 32, 32, 11_008, attention="flash")
        >>> run = Run(model, as_measured(CHIPS["h100"]), "bfloat16", measured("h100:8"), 8, 8192, strategy="zero3")
        >>> round(estimate(run).step_s, 1)
        0.6
    """
    forward_s, backward_s = forward_seconds(run), _backward_seconds(run)
    exposed_s = _exposed_seconds(run, forward_s, backward_s)
    if run.strategy == "zero3":
        exposed_s *= run.num_microbatches
    return StepTime(
        run.num_microbatches * forward_s, run.num_microbatches * backward_s, _optimizer_seconds(run), exposed_s
    )


def product_seconds(run: Run) -> float:
    """Seconds of the forward's products of all tokens with matrices."""
    return sum(
        count * _product_s(run, run.tokens, columns, rows) for count, rows, columns in run.workload.products
    )  # fmt: skip


def forward_seconds(run: Run) -> float:
    """Seconds of one forward."""
    return _launched(run, product_seconds(run) + _attention_seconds(run, 2) + _moved_seconds(run), 1)


def _backward_seconds(run: Run) -> float:
    """Gradients of inputs and of matrices, and what is computed again."""
    of_inputs = sum(
        count * _product_s(run, run.tokens, rows, columns) for count, rows, columns in run.workload.products
    )
    of_matrices = sum(
        count * _product_s(run, rows, columns, run.tokens) for count, rows, columns in run.workload.products
    )  # fmt: skip
    is_flash = run.workload.attention is not None and run.workload.attention.is_flash
    again = run.workload.recomputed
    products = of_inputs + of_matrices + again * product_seconds(run)
    attention = _attention_seconds(run, 5 if is_flash else 4) + (_attention_seconds(run, 2) if again == 1 else 0.0)
    return _launched(run, products + attention + (2 + math.ceil(again)) * _moved_seconds(run), 2 + again)


def _product_s(run: Run, rows: int, columns: int, contracted: int) -> float:
    flops_s = 2 * rows * columns * contracted / product_rate(run.chip, run.products, (1, rows, columns, contracted))
    elements = rows * contracted + contracted * columns + rows * columns
    return max(flops_s, elements * run.element_bytes / memory_rate(run.chip))


def _attention_seconds(run: Run, num_products: int) -> float:
    if (attention := run.workload.attention) is None:
        return 0.0
    flops = attention.flops_per_token * run.tokens * num_products / 2
    if attention.is_flash:
        return flops / attention_rate(run.chip, "bfloat16" if run.products == "float8" else run.products)
    batch = max(1, run.tokens // attention.context) * attention.num_heads
    shape = (batch, attention.context, attention.context, attention.width // attention.num_heads)
    return flops / product_rate(run.chip, run.products, shape)


def _moved_seconds(run: Run) -> float:
    """Memory-bound kernels of a forward, with the loss in float32."""
    workload = run.workload
    elements = workload.moved_per_token if run.is_compiled else workload.moved_unfused_per_token
    vocab = workload.products[-1][2] if workload.attention else 0
    num_bytes = run.tokens * (elements * run.element_bytes + _LOGITS_PASSES * 4 * vocab)
    return num_bytes / memory_rate(run.chip)


def _launched(run: Run, seconds: float, passes: float) -> float:
    """Adds the gaps of kernels to what they take; if the host launches each, it takes at least as long as that."""
    kernels = passes * run.num_layers * _KERNELS_OF_A_BLOCK[not run.is_compiled]
    return seconds + kernels * kernel_s(run.chip) if run.is_compiled else max(seconds, kernels * _HOST_LAUNCH_S)


def _optimizer_seconds(run: Run) -> float:
    is_sharded = run.strategy not in DATA_PARALLEL
    share = 1 / run.num_ranks if is_sharded else 1.0
    seconds = share * run.workload.num_params * _UPDATE_BYTES[not run.is_compiled] / memory_rate(run.chip)
    launches = share * len(run.workload.tensors) * _UPDATE_KERNELS[not run.is_compiled] * _HOST_LAUNCH_S
    return seconds if run.is_compiled else max(seconds, launches)


def _exposed_seconds(run: Run, forward_s: float, backward_s: float) -> float:
    if run.num_ranks == 1:
        return 0.0
    if run.strategy == "zero3":
        return _exposed_of_zero3(run, forward_s, backward_s)
    tensors = [elements * run.gradient_bytes for elements in run.workload.tensor_elements]
    every = float(sum(tensors))
    if run.strategy == "flat":  # packed and unpacked: read and written twice
        return _seconds(run, "all-reduce", [every]) + 4 * every / memory_rate(run.chip)
    if run.strategy in ("naive", "sharded_optimizer"):
        updates = [4.0 * elements for elements in run.workload.tensor_elements]
        after = _seconds(run, "broadcast", updates) if run.strategy == "sharded_optimizer" else 0.0
        return _seconds(run, "all-reduce", tensors) + after
    if run.strategy != "overlapped":
        tensors = _buckets(tensors, run.bucket_mb * MIB)
    kind = "all-reduce" if run.strategy in DATA_PARALLEL else "reduce-scatter"
    last = _seconds(run, kind, tensors[-1:])
    update = _seconds(run, "all-gather", [float(run.element_bytes * run.workload.num_params)])
    hidden_s = backward_s * (1 - 1 / len(tensors))  # once the first bucket is full
    return last + max(0.0, _seconds(run, kind, tensors[:-1]) - hidden_s) + (0.0 if kind == "all-reduce" else update)


def _buckets(tensors: list[int], cap: float) -> list[int]:
    """Bytes of buckets in the order of the backward; a tensor is not split."""
    found = [0]
    for num_bytes in reversed(tensors):
        if found[-1] and found[-1] + num_bytes > cap:
            found.append(0)
        found[-1] += num_bytes
    return found


def _exposed_of_zero3(run: Run, forward_s: float, backward_s: float) -> float:
    units = run.workload.unit_params
    gathers = [float(run.element_bytes * unit) for unit in units]
    scatters = [float(run.gradient_bytes * unit) for unit in units]
    first, last = _seconds(run, "all-gather", gathers[:1]), _seconds(run, "reduce-scatter", scatters[:1])
    in_forward = _seconds(run, "all-gather", gathers[1:])
    in_backward = _seconds(run, "all-gather", gathers[:-1]) + _seconds(run, "reduce-scatter", scatters[1:])
    return first + max(0.0, in_forward - forward_s) + max(0.0, in_backward - backward_s) + last


def _seconds(run: Run, kind: str, sizes: Sequence[float]) -> float:
    """Seconds of collectives of all ranks one after the other."""
    alike = {size: sizes.count(size) for size in sizes}
    return sum(count * run.network.seconds(kind, size, range(run.num_ranks)) for size, count in alike.items())
