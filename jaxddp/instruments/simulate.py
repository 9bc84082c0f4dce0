"""Simulates a scheduled step on a device and a network: its time, and how much of its communication is exposed.

The compute stream runs the operations in schedule order; each takes the time of its FLOPs or of its bytes, whichever
is longer. A start queues its collective on the communication stream and returns at once; a done waits until the
collective has ended. Collectives run one after the other. The simulation is deterministic.

    c[i] compute before bucket i's start,  m[i] seconds of its collective:
    start[i] = max(sum of c[1 ... i], end[i-1]),   end[i] = start[i] + m[i],   step = max(compute, end[n]) + tail

Rates are those of the chip: its published peaks, or after ``products.as_measured`` what was measured of products by
their shapes and of memory, with a gap for each kernel. A roofline ignores caches and clocks.

References:
    Williams et al., Roofline: an insightful visual performance model, CACM 2009.

The least time that a step can take on a device and a network, for any strategy and schedule.

    bound = max(compute, forward + least work that any one gradient depends on + one all-reduce of all gradient bytes)

Nothing can be sent before the first gradient exists, and everything has to be sent. Compute, forward and first gradient
come from the same step compiled without communication, so slower compute cannot buy overlap.

On H hosts of n ranks each, which send W bytes per second within their host and V to others, the all-reduce of S bytes
has two levels, o being the latency of one call:

    all-reduce = o + 2 (n-1)/n S/W + 2 (H-1)/H (S/n)/V

Whatever the algorithm, each host must send 2 (H-1)/H S bytes, which its n ranks share, and that needs the sum over the
host first: the first half of the first term, whose second half spreads the result. ZeRO's halves, and its sums over
replicas, send the same. The levels of one collective follow each other, and collectives queue on one stream, so the
terms add up, in the bound as in the simulation. A measured network overlaps the levels of one collective, for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..network import Network
from ..planning.chips import Chip
from ..planning.products import attention_rate, kernel_s, memory_rate, product_rate
from .schedule import Collective, Operation, Schedule
from .work import MatmulKind, Work

_CHIP_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f64": "float64", "s8": "int8", "u8": "int8"}


@dataclass(frozen=True)
class Span:
    """Something that takes time.

    Attributes:
        lane: ``"compute"`` or ``"communication"``.
        kind: Phase of a computation, or kind of a collective.
        num_bytes: Bytes moved in memory, or of a collective's full buffer.
    """

    name: str
    lane: str
    kind: str
    start_s: float
    end_s: float
    num_bytes: int
    op_name: str = ""


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        spans: Sorted by start; gaps in the compute lane are waits for communication.
        communication_s: Time in which a collective runs.
        exposed_s: ``step_s - compute_s``.
    """

    spans: tuple[Span, ...]
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


def device_seconds(work: Work, chip: Chip) -> float:
    """Seconds at the chip's rates: for the FLOPs or for the bytes, whichever is longer, and for launches."""
    arithmetic = sum(flops / matmul_flops_per_s(kind, chip) for kind, flops in work.matmul_flops.items())
    vector = work.vector_flops / chip.flops_per_s["float32"] if "float32" in chip.flops_per_s else 0.0
    return max(arithmetic + vector, work.num_bytes / memory_rate(chip)) + work.num_kernels * kernel_s(chip)


def product_dtype(kind: MatmulKind, chip: Chip) -> tuple[str, int]:
    """The dtype in which a chip multiplies, and in how many products: float32 by default in TF32, or in bfloat16."""
    if kind.dtype == "f32":
        if kind.precision == "highest" and chip.platform == "gpu":
            return "float32", 1  # no tensor cores
        return chip.matmul_float32, {"default": 1, "high": 3, "highest": 6}[kind.precision]
    return "float8" if kind.dtype.startswith("f8") else _CHIP_DTYPES.get(kind.dtype, "float32"), 1


def matmul_flops_per_s(kind: MatmulKind, chip: Chip) -> float:
    """FLOP/s of matrix products of one kind; unpublished dtypes count as the slowest published one."""
    dtype, count = product_dtype(kind, chip)
    if kind.is_attention:
        return attention_rate(chip, dtype)
    return product_rate(chip, dtype, kind.shape) / count  # type: ignore[arg-type]


def simulate(schedule: Schedule, chip: Chip, network: Network) -> Simulation:
    """Simulates one step."""
    machine = _Machine(chip, network)
    machine.run(schedule.operations)
    step_s = max(machine.now, machine.network_free_s)
    spans = sorted(machine.spans, key=lambda span: (span.start_s, span.end_s, span.name))
    busy_s = sum(span.end_s - span.start_s for span in spans if span.lane == "communication")
    return Simulation(tuple(spans), step_s, machine.compute_s, busy_s, step_s - machine.compute_s)


class _Machine:
    """The compute stream and the communication stream."""

    def __init__(self, chip: Chip, network: Network) -> None:
        self.chip, self.network = chip, network
        self.now = self.compute_s = 0.0
        self.network_free_s = 0.0  # when the last collective ends
        self.spans: list[Span] = []

    def run(self, operations: tuple[Operation, ...]) -> None:
        end_s: dict[str, float] = {}
        for operation in operations:
            for _ in range(operation.trips if operation.body else 0):
                self.run(operation.body)
            self._compute(operation)
            if operation.starts:
                end_s[operation.name] = self._communicate(operation, operation.starts)
            if operation.waits_for in end_s:
                self.now = max(self.now, end_s[operation.waits_for])

    def _compute(self, operation: Operation) -> None:
        seconds = device_seconds(operation.work, self.chip)
        if seconds == 0:
            return
        start, self.now = self.now, self.now + seconds
        self.compute_s += seconds
        self.spans.append(Span(
            operation.name, "compute", operation.phase, start, self.now, int(operation.work.num_bytes),
            operation.op_name,
        ))  # fmt: skip

    def _communicate(self, operation: Operation, collective: Collective) -> float:
        """Queues a collective; returns when it ends."""
        kind, num_bytes = collective.kind, collective.num_bytes
        start = self.network_free_s = max(self.now, self.network_free_s)
        self.network_free_s += collective.seconds(self.network)
        self.spans.append(Span(
            operation.name, "communication", kind, start, self.network_free_s, num_bytes, collective.op_name
        ))  # fmt: skip
        return self.network_free_s


@dataclass(frozen=True)
class Bound:
    """The terms of the bound, in seconds.

    Attributes:
        compute_s: The whole step.
        forward_s: Its forward.
        first_gradient_s: The least backward time before any gradient is finished.
        all_reduce_s: One all-reduce of all gradient bytes.
    """

    compute_s: float
    forward_s: float
    first_gradient_s: float
    all_reduce_s: float

    @property
    def step_s(self) -> float:
        """The bound."""
        return max(self.compute_s, self.forward_s + self.first_gradient_s + self.all_reduce_s)


def lower_bound(alone: Schedule, chip: Chip, network: Network, gradient_bytes: float, num_devices: int) -> Bound:
    """Computes the bound from ``alone``, one rank's step compiled for one device of the target without communication.

    ``gradient_bytes`` counts all gradients as the strategy that sends least sends them.
    """
    seconds = {op.name: device_seconds(op.total_work, chip) for op in alone.operations}
    forward = sum(seconds[op.name] for op in alone.operations if op.phase == "forward")
    all_reduce = network.seconds("all-reduce", gradient_bytes, range(num_devices)) if gradient_bytes else 0.0
    return Bound(sum(seconds.values()), forward, _first_gradient_s(alone.operations, seconds), all_reduce)


def _first_gradient_s(operations: tuple[Operation, ...], seconds: dict[str, float]) -> float:
    """The least backward time on which a value passed to the optimizer depends."""
    by_name = {op.name: op for op in operations}
    needed: dict[str, int] = {}  # bit mask of the backward operations an operation depends on
    place = {op.name: 1 << index for index, op in enumerate(operations)}
    handed_over: dict[str, None] = {}
    for op in operations:
        known = [operand for operand in op.operands if operand in needed]
        needed[op.name] = place[op.name] if op.phase == "backward" else 0
        for operand in known:
            needed[op.name] |= needed[operand]
        if op.phase == "optimizer":
            handed_over.update((name, None) for name in known if by_name[name].phase == "backward")
    costs = [(place[op.name], seconds[op.name]) for op in operations if op.phase == "backward"]
    totals = (sum(cost for bit, cost in costs if needed[name] & bit) for name in handed_over)
    return min((total for total in totals if total > 0), default=0.0)
