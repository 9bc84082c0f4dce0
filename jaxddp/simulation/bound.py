"""The least time that a step can take on a device and a network, for any strategy and schedule.

    bound = max(compute, forward + least work that any one gradient depends on + one all-reduce of all gradient bytes)

Nothing can be sent before the first gradient exists, and everything has to be sent. Compute, forward and first gradient
come from the same step compiled without communication, so slower compute cannot buy overlap.

On H hosts of n ranks each, which send W bytes per second within their host and V to others, the all-reduce of S bytes
has two levels, o being the latency of one call:

    all-reduce = o + 2 (n-1)/n S/W + 2 (H-1)/H (S/n)/V

Whatever the algorithm, each host must send 2 (H-1)/H S bytes, which its n ranks share, and that needs the sum over the
host first: the first half of the first term, whose second half spreads the result. ZeRO's halves, and its sums over
replicas, send the same. The levels of one collective follow each other, and collectives queue on one stream, so the
terms add up, in the bound as in the simulation. NCCL sends pieces through both levels at a time, and may come down to
the longer term; neither side counts on that, so that their ratio judges the schedule alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compiled.schedule import Operation, Schedule
from ..network import Network
from ..planning.chips import Chip
from .simulate import device_seconds


@dataclass(frozen=True)
class Bound:
    """The terms of the bound, in seconds.

    Attributes:
        compute_s: The whole step.
        forward_s: Its forward.
        first_gradient_s: The least backward time before any gradient is finished.
        all_reduce_s: One all-reduce of all gradient bytes.
        between_hosts_s: The part of it in which hosts send to each other; 0 on one host.
    """

    compute_s: float
    forward_s: float
    first_gradient_s: float
    all_reduce_s: float
    between_hosts_s: float = 0.0

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
    all_reduce = between = 0.0
    if gradient_bytes:
        all_reduce = network.seconds("all-reduce", gradient_bytes, range(num_devices))
        between = network.seconds_between_hosts("all-reduce", gradient_bytes, range(num_devices))
    return Bound(sum(seconds.values()), forward, _first_gradient_s(alone.operations, seconds), all_reduce, between)


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
