"""Simulates a scheduled step on a device and a network: its time, and how much of its communication is exposed.

The compute stream runs the operations in schedule order; each takes the time of its FLOPs or of its bytes, whichever
is longer. A start queues its collective on the communication stream and returns at once; a done waits until the
collective has ended. Collectives run one after the other. The simulation is deterministic.

    c[i] compute before bucket i's start,  m[i] seconds of its collective:
    start[i] = max(sum of c[1 ... i], end[i-1]),   end[i] = start[i] + m[i],   step = max(compute, end[n]) + tail

A roofline ignores caches, occupancy and launch gaps: times assume the device's published peaks, so compare only ratios.

References:
    Williams et al., Roofline: an insightful visual performance model, CACM 2009.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..arguments import check_kind
from ..compiled.schedule import Collective, Operation, Schedule
from ..compiled.work import MatmulKind, Work
from ..network import DEFAULT_LATENCY_US, Network
from ..planning.chips import Chip, Target

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
    """Seconds of a device at its published peaks: for the FLOPs or for the bytes, whichever is longer."""
    arithmetic = sum(flops / matmul_flops_per_s(kind, chip) for kind, flops in work.matmul_flops.items())
    vector = work.vector_flops / chip.flops_per_s["float32"] if "float32" in chip.flops_per_s else 0.0
    return max(arithmetic + vector, work.num_bytes / chip.memory_bytes_per_s)


def matmul_flops_per_s(kind: MatmulKind, chip: Chip) -> float:
    """FLOP/s of matrix products of one kind; unpublished dtypes count as the slowest published one."""
    rates = chip.flops_per_s
    if kind.dtype == "f32":
        fast = rates[chip.matmul_float32]
        if kind.precision == "default":
            return fast
        # Exact float32 uses no tensor cores on GPUs, and six bfloat16 products on TPUs; "high" uses three.
        exact = rates["float32"] if chip.platform == "gpu" else fast / 6
        return exact if kind.precision == "highest" else fast / 3
    name = "float8" if kind.dtype.startswith("f8") else _CHIP_DTYPES.get(kind.dtype, "float32")
    return rates.get(name, min(rates.values()))


def network_of(target: Target, gb_per_s: float | None = None, latency_us: float = DEFAULT_LATENCY_US) -> Network:
    """A target's links; a given speed replaces the slowest: between hosts if there are several."""
    check_kind("target", target, Target, "a Target, as jaxddp.targets.target gives it")
    chip = target.chip
    if target.num_hosts == 1 or target.platform == "tpu":
        return Network(chip.link_gb_per_s if gb_per_s is None else gb_per_s, latency_us)
    between_hosts = chip.host_link_gb_per_s if gb_per_s is None else gb_per_s
    return Network(chip.link_gb_per_s, latency_us, between_hosts, target.devices_per_host)


def network_in_words(target: Target, network: Network) -> str:
    """Where the network's speeds come from, and what to give instead.

    Example:
        >>> from ..planning.chips import target
        >>> network_in_words(target("h100:8"), Network(50))
        'network: 50 GB/s a GPU as given, what a GPU sends to other hosts: that is one GPU a host, h100:8x1'
    """
    chip, published = target.chip, network_of(target)
    is_given = network != replace(published, latency_us=network.latency_us)
    if target.platform == "tpu":
        return f"network: {network.gb_per_s:g} GB/s a chip, {'as given' if is_given else 'all its links as published'}"
    nvlink = f"{network.gb_per_s:g} GB/s a GPU, NVLink's published peak (rings reach about 360 of an H100's 450)"
    if target.num_hosts > 1:
        nic = f"{network.host_gb_per_s:g} GB/s a GPU, {'as given' if is_given else 'a published NIC for each'}"
        within = "" if target.devices_per_host == 1 else f"within a host {nvlink}, "
        return f"network: {within}between hosts {nic}"
    if not is_given:
        return f"network: {nvlink}: try --network-gb-per-s {0.8 * chip.link_gb_per_s:g}"
    given = f"network: {network.gb_per_s:g} GB/s a GPU as given"
    if network.gb_per_s > chip.host_link_gb_per_s or target.num_devices == 1:
        return given
    return f"{given}, what a GPU sends to other hosts: that is one GPU a host, {chip.name}:{target.num_devices}x1"


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
        if len(collective.group) > 1:
            self.network_free_s += self.network.latency_s(kind)
            self.network_free_s += self.network.transfer_s(kind, num_bytes, collective.group)
        self.spans.append(Span(
            operation.name, "communication", kind, start, self.network_free_s, num_bytes, collective.op_name
        ))  # fmt: skip
        return self.network_free_s
