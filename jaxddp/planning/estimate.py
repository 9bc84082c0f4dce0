"""How long a data-parallel step takes, by formulas: computing at a chip's rates, and the communication that it exposes.

    forward     products at the rate of their shapes, or as long as they take to read and write; attention; what
                memory-bound kernels move; a gap per kernel
    backward    twice the forward, five attention products for two, and what checkpointing computes again
    optimizer   bytes of AdamW's update: 32 a parameter in one kernel, 132 operation by operation
    exposed     naive, flat               all-reduces after the backward
                overlapped, bucketed      what the backward does not hide, and the last bucket
                zero1, zero2              the same with reduce-scatters, and the all-gather of the update
                sharded_optimizer         as naive, and broadcasts of the update
                zero3                     the first unit's gather, what neither pass hides, and the last reduce-scatter

Left out: clocks that fall under load, kernels that share the chip with collectives, the slowest rank, the input.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..communication.buckets import DEFAULT_BUCKET_MB, TensorSpec, plan_buckets
from ..network import Network
from .chips import Chip
from .formulas import DATA_PARALLEL
from .products import attention_rate, product_rate
from .workload import Workload

_HOST_LAUNCH_S = 5e-6  # of each operation without compilation: XLA's first estimate
_UPDATE_BYTES = (32, 132)  # AdamW reads and writes parameter and moments in float32, reads the gradient, and its norm
_KERNELS_OF_A_BLOCK = (12, 45)
_LOGITS_PASSES = 3  # the loss reads the logits, and reads and writes them in float32


class StepTime(NamedTuple):
    """Seconds of a step by part."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self)


@dataclass(frozen=True)
class Run:
    """A data-parallel training run on one kind of chip."""

    workload: Workload
    chip: Chip  # with its rates: ``as_measured``, or published peaks
    products: str  # the dtype in which products are computed, as in ``Chip.flops_per_s``
    network: Network
    num_ranks: int
    tokens: int  # of a rank in one micro-batch
    num_microbatches: int = 1
    strategy: str = "bucketed"  # one of ``formulas.STRATEGIES``
    bucket_mb: float = DEFAULT_BUCKET_MB
    element_bytes: int = 2  # of an activation, and of a parameter that zero3 gathers
    gradient_bytes: int = 4  # of a gradient on the wire
    is_compiled: bool = True  # whether operations are fused, and launched without the host
    param_bytes: int = 4  # of an updated parameter that zero1 and zero2 gather


def estimate(run: Run) -> StepTime:
    """Estimates one step."""
    work, again, bytes_per_s = run.workload, run.workload.recomputed, run.chip.memory_bytes_per_s
    # What memory-bound kernels of a forward move, with the loss in float32.
    elements = work.moved_per_token if run.is_compiled else work.moved_unfused_per_token
    vocab = work.products[-1][2] if work.attention else 0
    moved_s = run.tokens * (elements * run.element_bytes + _LOGITS_PASSES * 4 * vocab) / bytes_per_s
    products_s, mix_s = product_seconds(run), _attention_seconds(run, 2)
    forward_s = _launched(run, products_s + mix_s + moved_s, 1)
    gradients_s = sum(
        count * (_product_s(run, run.tokens, rows, columns) + _product_s(run, rows, columns, run.tokens))
        for count, rows, columns in work.products
    )
    is_flash = work.attention is not None and work.attention.is_flash
    attention_s = _attention_seconds(run, 5 if is_flash else 4) + (mix_s if again == 1 else 0.0)
    computed_s = gradients_s + again * products_s + attention_s + (2 + math.ceil(again)) * moved_s
    backward_s = _launched(run, computed_s, 2 + again)
    exposed_s = _exposed_seconds(run, forward_s, backward_s) if run.num_ranks > 1 else 0.0
    passes = run.num_microbatches
    share = 1.0 if run.strategy in DATA_PARALLEL else 1 / run.num_ranks
    optimizer_s = share * work.num_params * _UPDATE_BYTES[not run.is_compiled] / bytes_per_s
    if not run.is_compiled:
        optimizer_s = max(optimizer_s, share * len(work.tensors) * 15 * _HOST_LAUNCH_S)  # 15 kernels a tensor
    return StepTime(passes * forward_s, passes * backward_s, optimizer_s, exposed_s)


def product_seconds(run: Run) -> float:
    """Seconds of the forward's products of all tokens with matrices."""
    return sum(count * _product_s(run, run.tokens, columns, rows) for count, rows, columns in run.workload.products)


def _product_s(run: Run, rows: int, columns: int, contracted: int) -> float:
    flops_s = 2 * rows * columns * contracted / product_rate(run.chip, run.products, (1, rows, columns, contracted))
    elements = rows * contracted + contracted * columns + rows * columns
    return max(flops_s, elements * run.element_bytes / run.chip.memory_bytes_per_s)


def _attention_seconds(run: Run, num_products: int) -> float:
    if (attention := run.workload.attention) is None:
        return 0.0
    flops = attention.flops_per_token * run.tokens * num_products / 2
    if attention.is_flash:
        return flops / attention_rate(run.chip, "bfloat16" if run.products == "float8" else run.products)
    batch = max(1, run.tokens // attention.context) * attention.num_heads
    shape = (batch, attention.context, attention.context, attention.width // attention.num_heads)
    return flops / product_rate(run.chip, run.products, shape)


def _launched(run: Run, seconds: float, passes: float) -> float:
    """Adds the gaps of kernels to what they take; if the host launches each, it takes at least as long as that."""
    num_layers = max(1, len(run.workload.unit_tensors) - 2)
    kernels = passes * num_layers * _KERNELS_OF_A_BLOCK[not run.is_compiled]
    return seconds + kernels * run.chip.kernel_s if run.is_compiled else max(seconds, kernels * _HOST_LAUNCH_S)


def _exposed_seconds(run: Run, forward_s: float, backward_s: float) -> float:
    """Of a whole step, whose micro-batches take ``forward_s`` and ``backward_s`` each."""

    def seconds(kind: str, sizes: Sequence[float]) -> float:  # of collectives of all ranks one after the other
        alike = {size: sizes.count(size) for size in sizes}
        return sum(count * run.network.seconds(kind, size, range(run.num_ranks)) for size, count in alike.items())

    tensors = [elements * run.gradient_bytes for elements in run.workload.tensor_elements]
    every = float(sum(tensors))
    match run.strategy:
        case "zero3":
            gathers = [float(run.element_bytes * unit) for unit in run.workload.unit_params]
            scatters = [float(run.gradient_bytes * unit) for unit in run.workload.unit_params]
            first_and_last = seconds("all-gather", gathers[:1]) + seconds("reduce-scatter", scatters[:1])
            in_backward = seconds("all-gather", gathers[:-1]) + seconds("reduce-scatter", scatters[1:])
            in_forward = seconds("all-gather", gathers[1:])
            exposed_s = first_and_last + max(0.0, in_forward - forward_s) + max(0.0, in_backward - backward_s)
            return run.num_microbatches * exposed_s
        case "flat":  # packed and unpacked: read and written twice
            return seconds("all-reduce", [every]) + 4 * every / run.chip.memory_bytes_per_s
        case "naive":
            return seconds("all-reduce", tensors)
        case "sharded_optimizer":
            updates = [float(run.param_bytes * elements) for elements in run.workload.tensor_elements]
            return seconds("all-reduce", tensors) + seconds("broadcast", updates)
    buckets = tensors
    if run.strategy != "overlapped":
        dtype = "bfloat16" if run.gradient_bytes == 2 else "float32"
        specs = [TensorSpec(name, shape, dtype) for name, shape in reversed(run.workload.tensors)]
        buckets = [bucket.num_bytes for bucket in plan_buckets(specs, run.bucket_mb).buckets]
    kind = "all-reduce" if run.strategy in DATA_PARALLEL else "reduce-scatter"
    hidden_s = backward_s * (1 - 1 / len(buckets))  # once the first bucket is full
    exposed_s = seconds(kind, buckets[-1:]) + max(0.0, seconds(kind, buckets[:-1]) - hidden_s)
    if run.strategy == "zero2":  # others reduce the sum of all micro-batches
        exposed_s *= run.num_microbatches
    if kind == "reduce-scatter":
        exposed_s += seconds("all-gather", [float(run.param_bytes * run.workload.num_params)])
    return exposed_s
