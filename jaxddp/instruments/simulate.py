"""Simulates a scheduled step on a device and a network: its time, how much communication is exposed, and the bound.

The compute stream runs the operations in schedule order; each takes the time of its FLOPs or of its bytes, whichever is
longer. A start queues its collective on the communication stream, where one runs after the other; a done waits for it:

    c[i] compute before bucket i's start,  m[i] seconds of its collective:
    start[i] = max(sum of c[1 ... i], end[i-1]),   end[i] = start[i] + m[i],   step = max(compute, end[n]) + tail

The least time under any strategy, with the compute of the step compiled without communication:

    bound = max(compute, forward + least work that any one gradient depends on + one all-reduce of all gradient bytes)
"""

import functools
from dataclasses import dataclass

from ..network import Network
from ..planning.chips import Chip
from ..planning.products import attention_rate, product_rate
from .schedule import Operation, Schedule
from .work import MatmulKind, Work

_CHIP_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f64": "float64", "s8": "int8", "u8": "int8"}


@dataclass(frozen=True)
class Span:
    """Something that takes time."""

    name: str
    lane: str  # "compute" or "communication"
    kind: str  # phase of a computation, or kind of a collective
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step."""

    spans: tuple[Span, ...]  # sorted by start; gaps in the compute lane are waits for communication
    step_s: float
    compute_s: float
    communication_s: float  # time in which a collective runs
    exposed_s: float  # step_s - compute_s


def device_seconds(work: Work, chip: Chip) -> float:
    """Seconds at the chip's rates: for the FLOPs or for the bytes, whichever is longer, and for launches."""
    arithmetic = sum(flops / matmul_flops_per_s(kind, chip) for kind, flops in work.matmul_flops.items())
    vector = work.vector_flops / chip.flops_per_s["float32"] if "float32" in chip.flops_per_s else 0.0
    return max(arithmetic + vector, work.num_bytes / chip.memory_bytes_per_s) + work.num_kernels * chip.kernel_s


def operation_seconds(operation: Operation, chip: Chip) -> float:
    """Seconds of an operation or, of a loop, of one after the other in its rounds."""
    inner_s = sum(operation_seconds(inner, chip) for inner in operation.body)
    return device_seconds(operation.work, chip) + operation.trips * inner_s


def multiplied_in(kind: MatmulKind, chip: Chip) -> tuple[str, int]:
    """The dtype in which a chip multiplies, and in how many products: float32 by default in TF32, or in bfloat16."""
    if kind.dtype == "f32":
        if kind.precision == "highest" and chip.platform == "gpu":
            return "float32", 1  # no tensor cores
        return chip.matmul_float32, {"default": 1, "high": 3, "highest": 6}[kind.precision]
    return "float8" if kind.dtype.startswith("f8") else _CHIP_DTYPES.get(kind.dtype, "float32"), 1


def matmul_flops_per_s(kind: MatmulKind, chip: Chip) -> float:
    """FLOP/s of matrix products of one kind; unpublished dtypes count as the slowest published one."""
    dtype, count = multiplied_in(kind, chip)
    if kind.is_attention:
        return attention_rate(chip, dtype)
    return product_rate(chip, dtype, kind.shape) / count  # type: ignore[arg-type]


def simulate(schedule: Schedule, chip: Chip, network: Network) -> Simulation:
    """Simulates one step."""
    now = compute_s = network_free_s = 0.0  # the last: when the last collective ends
    spans: list[Span] = []

    def run(operations: tuple[Operation, ...]) -> None:
        nonlocal now, compute_s, network_free_s
        end_s: dict[str, float] = {}
        for one in operations:
            for _ in range(one.trips if one.body and one.communicates else 0):
                run(one.body)
            if seconds := device_seconds(one.work, chip) if one.communicates else operation_seconds(one, chip):
                spans.append(Span(one.name, "compute", one.phase, now, now + seconds))
                now, compute_s = now + seconds, compute_s + seconds
            if sent := one.starts:
                start = max(now, network_free_s)
                end_s[one.name] = network_free_s = start + sent.seconds(network)
                spans.append(Span(one.name, "communication", sent.kind, start, network_free_s))
            now = max(now, end_s.get(one.waits_for, 0.0))

    run(schedule.operations)
    step_s = max(now, network_free_s)
    spans.sort(key=lambda span: (span.start_s, span.end_s, span.name))
    busy_s = sum(span.end_s - span.start_s for span in spans if span.lane == "communication")
    return Simulation(tuple(spans), step_s, compute_s, busy_s, step_s - compute_s)


@dataclass
class Bound:
    """The terms of the bound, in seconds, and the bound itself, ``step_s``."""

    compute_s: float  # the whole step
    forward_s: float  # its forward
    first_gradient_s: float  # the least backward time before any gradient is finished
    all_reduce_s: float  # one all-reduce of all gradient bytes

    def __post_init__(self) -> None:
        self.step_s = max(self.compute_s, self.forward_s + self.first_gradient_s + self.all_reduce_s)


def lower_bound(alone: Schedule, chip: Chip, network: Network, gradient_bytes: float, num_devices: int) -> Bound:
    """Computes the bound from ``alone``, the step without communication, and the bytes of all gradients."""
    seconds = {op.name: operation_seconds(op, chip) for op in alone.operations}
    forward = sum(seconds[op.name] for op in alone.operations if op.phase == "forward")
    all_reduce = network.seconds("all-reduce", gradient_bytes, range(num_devices)) if gradient_bytes else 0.0
    # Of the values passed to the optimizer, the one that depends on the least backward time.
    backward = {op.name: 1 << place for place, op in enumerate(alone.operations) if op.phase == "backward"}
    needed: dict[str, int] = {}  # bit mask of the backward operations that an operation depends on
    handed_over: dict[str, None] = {}
    for op in alone.operations:
        known = [operand for operand in op.operands if operand in needed]
        needed[op.name] = functools.reduce(int.__or__, (needed[name] for name in known), backward.get(op.name, 0))
        if op.phase == "optimizer":
            handed_over.update((name, None) for name in known if name in backward)
    totals = (sum(seconds[each] for each, bit in backward.items() if needed[name] & bit) for name in handed_over)
    first_gradient = min((total for total in totals if total > 0), default=0.0)
    return Bound(sum(seconds.values()), forward, first_gradient, all_reduce)
