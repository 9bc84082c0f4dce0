"""Simulates a scheduled step on a device and a network: its time, and how much of its communication is exposed.

The compute stream runs the operations in schedule order; each takes the time of its FLOPs or of its bytes, whichever
is longer. A start queues its collective on a communication stream and returns at once; a done waits until the
collective has ended. Collectives of one stream run one after the other; several streams share the network evenly. The
simulation is deterministic.

    c[i] compute before bucket i's start,  m[i] seconds of its collective:
    start[i] = max(sum of c[1 ... i], end[i-1]),   end[i] = start[i] + m[i],   step = max(compute, end[n]) + tail

A roofline ignores caches, occupancy and launch gaps: times assume the device's published peaks, so compare only ratios.

References:
    Williams et al., Roofline: an insightful visual performance model, CACM 2009.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

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
        stream: Number of the communication stream.
    """

    name: str
    lane: str
    kind: str
    start_s: float
    end_s: float
    num_bytes: int
    stream: int = 0
    op_name: str = ""


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        spans: Sorted by start; gaps in the compute lane are waits for communication.
        communication_s: Time in which at least one collective runs.
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


def simulate(schedule: Schedule, chip: Chip, network: Network, *, num_streams: int = 1) -> Simulation:
    """Simulates one step.

    Raises:
        ValueError: If ``num_streams`` is not positive.
    """
    if num_streams < 1:
        raise ValueError(f"num_streams (={num_streams}) must be a positive integer")
    machine = _Machine(chip, network, num_streams)
    machine.run(schedule.operations)
    machine.links.run_until_idle()
    step_s = max(machine.now, machine.links.now)
    spans = sorted(machine.spans + machine.links.spans, key=lambda span: (span.start_s, span.end_s, span.name))
    busy = _union([(span.start_s, span.end_s) for span in machine.links.spans])
    return Simulation(tuple(spans), step_s, machine.compute_s, busy, step_s - machine.compute_s)


class _Machine:
    """The compute stream."""

    def __init__(self, chip: Chip, network: Network, num_streams: int) -> None:
        self.chip = chip
        self.links = _Links(network, num_streams)
        self.now = self.compute_s = 0.0
        self.spans: list[Span] = []

    def run(self, operations: tuple[Operation, ...]) -> None:
        issued: dict[str, _Flow] = {}
        for operation in operations:
            for _ in range(operation.trips if operation.body else 0):
                self.run(operation.body)
            self._compute(operation)
            if operation.starts:
                self.links.run_until(self.now)
                issued[operation.name] = self.links.enqueue(operation)
            if operation.waits_for in issued:
                self.now = max(self.now, self.links.run_until_done(issued[operation.waits_for]))

    def _compute(self, operation: Operation) -> None:
        seconds = device_seconds(operation.work, self.chip)
        if seconds == 0:
            return
        start, self.now = self.now, self.now + seconds
        self.compute_s += seconds
        self.spans.append(Span(
            operation.name, "compute", operation.phase, start, self.now, int(operation.work.num_bytes),
            op_name=operation.op_name,
        ))  # fmt: skip


@dataclass
class _Flow:
    """A collective in progress."""

    name: str
    collective: Collective
    latency_left_s: float
    transfer_left_s: float  # with the network to itself
    start_s: float = -1.0
    end_s: float = -1.0


class _Links:
    """The communication streams, and the network that they share."""

    def __init__(self, network: Network, num_streams: int) -> None:
        self.network = network
        self.queues: list[deque[_Flow]] = [deque() for _ in range(num_streams)]
        self.now = 0.0
        self.spans: list[Span] = []

    def enqueue(self, operation: Operation) -> _Flow:
        collective = operation.starts
        assert collective is not None
        latency = self.network.latency_s(collective.kind)
        transfer = self.network.transfer_s(collective.kind, collective.num_bytes, collective.group)
        alone = len(collective.group) < 2
        flow = _Flow(operation.name, collective, 0.0 if alone else latency, 0.0 if alone else transfer)
        min(self.queues, key=len).append(flow)
        return flow

    def run_until(self, time_s: float) -> None:
        """Advances the network to a point in time."""
        while self.now < time_s:
            if not self._advance(time_s):
                self.now = time_s

    def run_until_done(self, flow: _Flow) -> float:
        """Advances the network until a collective has ended; returns its end."""
        while flow.end_s < 0:
            advanced = self._advance(float("inf"))
            assert advanced, "a collective that was issued must be queued"
        return flow.end_s

    def run_until_idle(self) -> None:
        while self._advance(float("inf")):
            pass

    def _advance(self, limit_s: float) -> bool:
        """Advances to the next event or the limit; False if nothing is queued."""
        active = [(stream, queue[0]) for stream, queue in enumerate(self.queues) if queue]
        if not active:
            return False
        for _, flow in active:
            flow.start_s = self.now if flow.start_s < 0 else flow.start_s
        sharing = sum(flow.latency_left_s == 0 for _, flow in active)
        left = [flow.latency_left_s or flow.transfer_left_s * sharing for _, flow in active]
        passed = min(min(left), limit_s - self.now)
        ends = limit_s if passed == limit_s - self.now else self.now + passed
        for (stream, flow), remaining in zip(active, left, strict=True):
            finished = remaining <= passed
            if flow.latency_left_s > 0:
                flow.latency_left_s = 0.0 if finished else flow.latency_left_s - passed
                finished = finished and flow.transfer_left_s == 0
            else:
                flow.transfer_left_s = 0.0 if finished else flow.transfer_left_s - passed / sharing
            if finished:
                flow.end_s = ends
                self.queues[stream].popleft()
                self.spans.append(Span(
                    flow.name, "communication", flow.collective.kind, flow.start_s, ends, flow.collective.num_bytes,
                    stream, flow.collective.op_name,
                ))  # fmt: skip
        self.now = ends
        return True


def _union(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
