"""A network as two numbers: bandwidth per rank, and latency per call.

For S bytes over N ranks that each send W bytes per second, with ring algorithms and one latency o per all-reduce:

    all-reduce        o   + 2 (N-1)/N S/W          collective-permute    o/2 + S/W
    reduce-scatter    o/2 +   (N-1)/N S/W          all-to-all            o/2 + (N-1)/N S/W
    all-gather        o/2 +   (N-1)/N S/W          broadcast             o/2 + S/W

A group that spans H hosts with n ranks each communicates within hosts first and then between hosts with 1/n of the
bytes per rank: the same formula with n, S and the link's W, plus that with H, S/n and the host link's W. What is sent
from rank to rank directly has no first and second: an all-to-all sends (n-1)/N S within its host and (N-n)/N S to
others, a permutation S either way, and the slower of the two counts.

References:
    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import check_integer, is_number

GB = 1e9
DEFAULT_LATENCY_US = 15.0

# Bytes that a rank sends as a multiple of S, and whether that is scaled by (N-1)/N.
_VOLUMES = {
    "all-reduce": (2.0, True),
    "reduce-scatter": (1.0, True),
    "all-gather": (1.0, True),
    "all-to-all": (1.0, True),
    "ragged-all-to-all": (1.0, True),
    "collective-permute": (1.0, False),
    "collective-broadcast": (1.0, False),
    "send": (1.0, False),
    "recv": (1.0, False),
}
_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
_DIRECT = (*_ALL_TO_ALL, "collective-permute", "send", "recv")  # from rank to rank, at both levels at once


@dataclass(frozen=True)
class Network:
    """What connects the ranks.

    Attributes:
        gb_per_s: 10^9 bytes per second that a rank can send within its host.
        latency_us: Microseconds per all-reduce call; other collectives have half of it.
        host_gb_per_s: What a rank can send to other hosts; ``gb_per_s`` when None.
        devices_per_host: Ranks per host; all of them when None.

    Raises:
        ValueError: If a speed is not a positive finite number, the latency is negative, or there are no devices per
            host.

    Example:
        >>> round(Network(gb_per_s=50, latency_us=15).seconds("all-reduce", 10**9, range(8)), 6)
        0.035015
    """

    gb_per_s: float
    latency_us: float = DEFAULT_LATENCY_US
    host_gb_per_s: float | None = None
    devices_per_host: int | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("gb_per_s", "host_gb_per_s"):
            speed = getattr(self, name)
            if (speed is not None or name == "gb_per_s") and not (is_number(speed) and 0 < speed < math.inf):
                raise ValueError(f"network {name} (={speed}) must be a positive finite number of 10^9 bytes per second")
        if self.devices_per_host is not None:
            check_integer("devices_per_host", self.devices_per_host)
        if not is_number(self.latency_us) or not 0 <= self.latency_us < math.inf:
            raise ValueError(f"latency_us (={self.latency_us}) must be a finite number of microseconds, 0 or more")

    def latency_s(self, kind: str) -> float:
        """Latency of one call in seconds."""
        return self.latency_us * 1e-6 * (1.0 if kind == "all-reduce" else 0.5)

    def sent_bytes(self, kind: str, num_bytes: float, group: Sequence[int]) -> tuple[float, float]:
        """Bytes that a rank sends in one collective: to ranks of its own host, and to other hosts.

        ``num_bytes`` is the size of the full buffer; ``group`` holds device numbers. Of a permutation along a ring of
        several hosts, it is what the rank at a host's end sends.
        """
        volume, is_scaled = _VOLUMES[kind]

        def ring(count: float, size: float) -> float:
            share = (count - 1) / count if is_scaled else float(count > 1)
            return volume * share * size

        per_host = self.devices_per_host or max(group) + 1
        on_each_host = Counter(device // per_host for device in group)
        local, num_ranks = max(on_each_host.values()), on_each_host.total()
        if kind in _ALL_TO_ALL:
            others = num_ranks - min(on_each_host.values())
            return num_bytes * (local - 1) / num_ranks, num_bytes * others / num_ranks
        if kind in _DIRECT:
            return ring(local, num_bytes), ring(len(on_each_host), num_bytes)
        return ring(local, num_bytes), ring(len(on_each_host), num_bytes / local)

    def transfer_s(self, kind: str, num_bytes: float, group: Sequence[int]) -> float:
        """Seconds to transfer the bytes of one collective, without latency; 0 for a group of one."""
        if len(group) < 2:
            return 0.0
        within, _ = self.sent_bytes(kind, num_bytes, group)
        levels = within / (self.gb_per_s * GB), self.seconds_between_hosts(kind, num_bytes, group)
        return max(levels) if kind in _DIRECT else sum(levels)

    def seconds_between_hosts(self, kind: str, num_bytes: float, group: Sequence[int]) -> float:
        """The part of ``transfer_s`` in which hosts send to each other; 0 for a group on one host."""
        _, between = self.sent_bytes(kind, num_bytes, group)
        return between / ((self.host_gb_per_s or self.gb_per_s) * GB)

    def seconds(self, kind: str, num_bytes: float, group: Sequence[int]) -> float:
        """Seconds of one collective that has the network to itself; 0 for a group of one."""
        return self.latency_s(kind) + self.transfer_s(kind, num_bytes, group) if len(group) > 1 else 0.0
