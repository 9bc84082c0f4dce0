"""How long a collective takes: by measured curves, or by two assumed numbers, bandwidth per rank and latency per call.

For S bytes over N ranks that each send W bytes per second, with ring algorithms and one latency o per all-reduce:

    all-reduce        o   + 2 (N-1)/N S/W          collective-permute    o/2 + S/W
    reduce-scatter    o/2 +   (N-1)/N S/W          all-to-all            o/2 + (N-1)/N S/W
    all-gather        o/2 +   (N-1)/N S/W          broadcast             o/2 + S/W

A group that spans H hosts with n ranks each communicates within hosts first and then between hosts with 1/n of the
bytes per rank: the same formula with n, S and the link's W, plus that with H, S/n and the host link's W. What is sent
from rank to rank directly has no first and second: an all-to-all sends (n-1)/N S within its host and (N-n)/N S to
others, a permutation S either way, and the slower of the two counts.

A measured network (``tables.py``) has the times of collectives within a host by kind, ranks and bytes. A
size between two measured ones is interpolated in the logarithms of both, as is a number of ranks; beyond the table the
nearest row's rate is taken, and ``assumed`` says so. What was not measured follows from the two numbers.

Over several hosts NCCL sends pieces through both levels at a time, so a measured network takes the longer of them, plus
the latency between hosts. An all-reduce is a tree of hosts, a reduce-scatter or an all-gather one ring of all ranks:

    all-reduce                     max(curve of n ranks,  2 (H-1)/H S/n / V) + L
    reduce-scatter, all-gather     max(curve of n ranks,    (N-1)/N S/n / V) + L

A fabric that was measured itself (``measured("h100:2x8", fabric="a3mega")``) has a table of such times in place of this
formula; for other numbers of hosts they grow as the formula's bytes do.

References:
    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..arguments import check_integer, is_number

GB = 1e9
DEFAULT_LATENCY_US = 15.0
DEFAULT_HOST_LATENCY_US = 50.0  # two hosts were measured to take from 22 to 123, by fabric

# Bytes that a rank sends as a multiple of S, and whether that is scaled by (N-1)/N.
_VOLUMES = {
    "all-reduce": (2.0, True),
    "reduce-scatter": (1.0, True),
    "all-gather": (1.0, True),
    "all-to-all": (1.0, True),
    "ragged-all-to-all": (1.0, True),
    "collective-permute": (1.0, False),
    "collective-broadcast": (1.0, False),
    "broadcast": (1.0, False),
    "reduce": (1.0, False),
    "send": (1.0, False),
    "recv": (1.0, False),
}
KINDS = tuple(_VOLUMES)
_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
_DIRECT = (*_ALL_TO_ALL, "collective-permute", "send", "recv")  # from rank to rank, at both levels at once


def bus_factor(kind: str, num_ranks: int) -> float:
    """Gives bus over algorithm bandwidth, as nccl-tests: the least that a rank sends, as a multiple of the full buffer.

    Example:
        >>> bus_factor("all-reduce", 4), bus_factor("broadcast", 4)
        (1.5, 1.0)
    """
    volume, is_scaled = _VOLUMES[kind]
    return volume * ((num_ranks - 1) / num_ranks if is_scaled else 1.0)


# (kind, ranks, rows of (bytes of the full buffer, seconds) by size)
Curves = tuple[tuple[str, int, tuple[tuple[float, float], ...]], ...]


@dataclass(frozen=True)
class Network:
    """What connects the ranks.

    Attributes:
        gb_per_s: 10^9 bytes per second that a rank can send within its host.
        latency_us: Microseconds per all-reduce call; other collectives have half of it.
        host_gb_per_s: What a rank can send to other hosts; ``gb_per_s`` when None.
        devices_per_host: Ranks per host; all of them when None.
        curves: Measured times within a host; empty if the numbers above are all that is known.
        host_latency_us: Microseconds that a call over several hosts adds to a measured curve.
        fabric: Measured times over hosts, with the number of hosts in place of that of ranks.
        source: Where the curves come from, in words.

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
    curves: Curves = field(default=(), repr=False)
    source: str = ""
    host_latency_us: float = DEFAULT_HOST_LATENCY_US
    fabric: Curves = field(default=(), repr=False)

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
        if len(group) < 2:
            return 0.0
        if not (curves := self._curves(kind)) or (local := self._ranks_of_a_host(group)) < 2:
            return self.latency_s(kind) + self.transfer_s(kind, num_bytes, group)
        within_s = _at_ranks(curves, local, num_bytes)
        if kind in _DIRECT:
            return max(within_s, self.seconds_between_hosts(kind, num_bytes, group))
        if local == len(group):
            return within_s
        if table := self._over_hosts(kind):
            (hosts, rows), *_ = table.items()
            measured_group = range(hosts * (self.devices_per_host or 1))
            share = _between_share(kind, local, group) / _between_share(kind, local, measured_group)
            return _at_size(rows, num_bytes) * share
        between_s = _between_share(kind, local, group) * num_bytes / ((self.host_gb_per_s or self.gb_per_s) * GB)
        return max(within_s, between_s) + self.host_latency_us * 1e-6

    def assumed(self, kind: str, num_bytes: float, group: Sequence[int]) -> str:
        """Says why ``seconds`` does not rest on measurements alone; empty if it does, or if nothing was measured."""
        if not self.curves or len(group) < 2:
            return ""
        if not (curves := self._curves(kind)):
            return f"{kind} was not measured: {self.gb_per_s:.0f} GB/s and {self.latency_us:.0f} us are assumed"
        if (local := self._ranks_of_a_host(group)) < len(group):
            return self._assumed_between_hosts(kind, num_bytes, len(group) / local)
        if local not in curves:
            return f"{kind} was measured with {', '.join(map(str, curves))} ranks, not with {local}"
        sizes = [size for size, _ in curves[local]]
        if not sizes[0] <= num_bytes <= sizes[-1]:
            return f"{kind} was measured from {sizes[0]:,.0f} to {sizes[-1]:,.0f} bytes: others are extrapolated"
        return ""

    def _assumed_between_hosts(self, kind: str, num_bytes: float, num_hosts: float) -> str:
        if not (table := self._over_hosts(kind)):
            speed = f"{self.host_gb_per_s or self.gb_per_s:g} GB/s and {self.host_latency_us:g} us"
            return f"{kind} between hosts was not measured: {speed} are assumed"
        (hosts, rows), *_ = table.items()
        if num_hosts != hosts:
            return f"{kind} was measured over {hosts} hosts, not over {num_hosts:g}"
        if not rows[0][0] <= num_bytes <= rows[-1][0]:
            return f"{kind} over hosts was measured from {rows[0][0]:,.0f} to {rows[-1][0]:,.0f} bytes"
        return "" if kind in {name for name, *_ in self.fabric} else f"{kind} over hosts is taken as an all-gather"

    def _over_hosts(self, kind: str) -> dict[int, tuple[tuple[float, float], ...]]:
        """The fabric's table of a kind by the number of hosts; a reduce-scatter without one has an all-gather's."""
        found = {hosts: rows for name, hosts, rows in self.fabric if name == kind}
        return found if found or kind != "reduce-scatter" else self._over_hosts("all-gather")

    def _curves(self, kind: str) -> dict[int, tuple[tuple[float, float], ...]]:
        same = {"ragged-all-to-all": "all-to-all"}.get(kind, kind)
        return {ranks: rows for name, ranks, rows in self.curves if name == same}

    def _ranks_of_a_host(self, group: Sequence[int]) -> int:
        per_host = self.devices_per_host or max(group) + 1
        return max(Counter(device // per_host for device in group).values())


def _between_share(kind: str, local: int, group: Sequence[int]) -> float:
    """What a rank sends to other hosts as a multiple of S, over ``local`` ranks on each."""
    hosts = len(group) / local
    return (2 * (hosts - 1) / hosts if kind == "all-reduce" else (len(group) - 1) / len(group)) / local


def _at_ranks(curves: dict[int, tuple[tuple[float, float], ...]], ranks: int, num_bytes: float) -> float:
    points = [(float(count), _at_size(rows, num_bytes)) for count, rows in sorted(curves.items())]
    return _between(points, ranks)


def _at_size(rows: Sequence[tuple[float, float]], num_bytes: float) -> float:
    if num_bytes > rows[-1][0]:
        return rows[-1][1] * num_bytes / rows[-1][0]
    return _between(rows, num_bytes)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolates in the logarithms of both; outside of the points, the nearest one's."""
    if at <= points[0][0] or at >= points[-1][0]:
        return points[0 if at <= points[0][0] else -1][1]
    (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(points) if pair[0][0] <= at <= pair[1][0])
    return y0 * (y1 / y0) ** (math.log(at / x0) / math.log(x1 / x0))
