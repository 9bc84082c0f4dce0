"""How long a collective takes: by measured curves, or by two assumed numbers, bandwidth per rank and latency per call.

For S bytes over N ranks that each send W bytes per second, with rings (Patarasuk and Yuan, JPDC 2009) and a latency o:

    all-reduce        o   + 2 (N-1)/N S/W          collective-permute    o/2 + S/W
    reduce-scatter    o/2 +   (N-1)/N S/W          all-to-all            o/2 + (N-1)/N S/W
    all-gather        o/2 +   (N-1)/N S/W          broadcast             o/2 + S/W

A group of n ranks on each of H hosts communicates within hosts first, the formula with n, S and the link's W, then
between them, with H, S/n and the host link's W. What is sent from rank to rank directly uses both levels at once, and
the slower one counts: an all-to-all sends (n-1)/N S within its host and (N-n)/N S to others, a permutation S.

Measured times (``tables.py``) are interpolated in the logarithms of sizes and of ranks; beyond the table the nearest
row's rate counts. Over hosts, with V bytes per second of a rank and L seconds of latency, NCCL uses both levels at
once, by a tree of hosts or, for others, one ring of all ranks:

    all-reduce                     max(curve of n ranks,  2 (H-1)/H S/n / V) + L
    reduce-scatter, all-gather     max(curve of n ranks,    (N-1)/N S/n / V) + L
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arguments import check_integer, check_positive

GB = 1e9
HOST_LATENCY_US = 50.0  # that a call over hosts adds to a curve; two hosts were measured to take 22 to 123, by fabric
_RING = {"all-reduce": 2.0, "reduce-scatter": 1.0, "all-gather": 1.0, "all-to-all": 1.0, "ragged-all-to-all": 1.0}
_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
_DIRECT = (*_ALL_TO_ALL, "collective-permute", "send", "recv")  # from rank to rank, at both levels at once
HLO_KINDS = (*_RING, "collective-permute", "collective-broadcast")
KINDS = (*HLO_KINDS, "broadcast", "reduce", "send", "recv")
Rows = Sequence[tuple[float, float]]  # bytes of the full buffer and seconds, by size
Curves = Mapping[str, Mapping[int, Rows]]  # by kind and number of ranks


def bus_factor(kind: str, num_ranks: int) -> float:
    """Gives bus over algorithm bandwidth: the least that a rank sends, as a multiple of the full buffer."""
    return _RING[kind] * ((num_ranks - 1) / num_ranks) if kind in _RING else 1.0


@dataclass(frozen=True)
class Network:
    """What connects the ranks; raises a ValueError if a number is out of range."""

    gb_per_s: float  # 10^9 bytes per second that a rank can send within its host
    latency_us: float = 15.0  # per all-reduce call; other collectives have half of it
    host_gb_per_s: float | None = None  # what a rank can send to other hosts; gb_per_s when None
    devices_per_host: int | None = None  # all of them when None
    curves: Curves = field(default_factory=dict, repr=False, hash=False)  # measured within a host, if anything was
    fabric: Curves = field(default_factory=dict, repr=False, hash=False)  # over hosts, whose number stands for ranks'
    source: str = ""  # where the curves come from, in words

    def __post_init__(self) -> None:
        check_positive("network gb_per_s", self.gb_per_s)
        if not 0 <= self.latency_us < math.inf:
            raise ValueError(f"latency_us (={self.latency_us}) must be a finite number of microseconds, 0 or more")
        if self.host_gb_per_s is not None:
            check_positive("network host_gb_per_s", self.host_gb_per_s)
        if self.devices_per_host is not None:
            check_integer("network devices_per_host", self.devices_per_host)

    def sent_bytes(self, kind: str, num_bytes: float, group: Sequence[int]) -> tuple[float, float]:
        """Bytes that a rank sends in one collective of devices: to ranks of its own host, and to other hosts."""
        by_host = self._by_host(group)
        local, num_ranks = max(by_host), sum(by_host)
        if kind in _ALL_TO_ALL:
            return num_bytes * (local - 1) / num_ranks, num_bytes * (num_ranks - min(by_host)) / num_ranks
        between = num_bytes if kind in _DIRECT else num_bytes / local
        within, over = ((count > 1) * bus_factor(kind, count) for count in (local, len(by_host)))
        return within * num_bytes, over * between

    def transfer_s(self, kind: str, num_bytes: float, group: Sequence[int]) -> float:
        """Seconds to transfer the bytes of one collective by the two numbers, without latency; 0 for a group of one."""
        within, between = self.sent_bytes(kind, num_bytes, group)
        levels = within / (self.gb_per_s * GB), between / ((self.host_gb_per_s or self.gb_per_s) * GB)
        return max(levels) if kind in _DIRECT else sum(levels)

    def seconds(self, kind: str, num_bytes: float, group: Sequence[int]) -> float:
        """Seconds of one collective that has the network to itself, of ``KINDS``; 0 for a group of one."""
        return self._seconds_and_why(kind, num_bytes, group)[0]

    def assumed(self, kind: str, num_bytes: float, group: Sequence[int]) -> str:
        """Says why ``seconds`` does not rest on measurements alone; empty if it does, or if nothing was measured."""
        return self._seconds_and_why(kind, num_bytes, group)[1] if self.curves else ""

    def _seconds_and_why(self, kind: str, num_bytes: float, group: Sequence[int]) -> tuple[float, str]:
        if kind not in KINDS:
            raise ValueError(f"kind (={kind!r}) must be one of {', '.join(KINDS)}")
        if len(group) < 2:
            return 0.0, ""
        by_host, host_speed = self._by_host(group), self.host_gb_per_s or self.gb_per_s
        curves, local = self.curves.get("all-to-all" if kind in _ALL_TO_ALL else kind, {}), max(by_host)
        if not curves or local < 2:
            latency_s = self.latency_us * 1e-6 * (1.0 if kind == "all-reduce" else 0.5)
            speed = self.gb_per_s if local > 1 else host_speed
            why = f"{kind} was not measured: {speed:.0f} GB/s and {self.latency_us:.0f} us are assumed"
            return latency_s + self.transfer_s(kind, num_bytes, group), why
        points = [(float(ranks), _at_size(rows, num_bytes)) for ranks, rows in sorted(curves.items())]
        within_s = _interpolated(points, local)
        if len(by_host) == 1:
            if local not in curves:
                return within_s, f"{kind} was measured with {', '.join(map(str, curves))} ranks, not with {local}"
            return within_s, _beyond(kind, curves[local], num_bytes)
        num_hosts = len(group) / local
        share = _between_share(kind, local, num_hosts)
        alike = "all-gather" if kind == "reduce-scatter" and kind not in self.fabric else kind
        if alike not in self.fabric:
            between = self.sent_bytes(kind, num_bytes, group)[1] if kind in _DIRECT else share * num_bytes
            why = f"{kind} between hosts was not measured: {host_speed:g} GB/s and {HOST_LATENCY_US:g} us are assumed"
            return max(within_s, between / (host_speed * GB)) + HOST_LATENCY_US * 1e-6, why
        ((measured, rows),) = self.fabric[alike].items()
        # Over other numbers of hosts a fabric's times grow as the formula's bytes do.
        seconds = _at_size(rows, num_bytes) * share / _between_share(kind, local, measured)
        if num_hosts != measured:
            return seconds, f"{kind} was measured over {measured} hosts, not over {num_hosts:g}"
        why = "" if alike == kind else f"{kind} over hosts is taken as an all-gather"
        return seconds, _beyond(f"{kind} over hosts", rows, num_bytes) or why

    def _by_host(self, group: Sequence[int]) -> list[int]:
        """How many devices of the group are on each of its hosts."""
        per_host = self.devices_per_host or max(group) + 1
        return list(Counter(device // per_host for device in group).values())


def _between_share(kind: str, local: int, hosts: float) -> float:
    """What a rank sends to other hosts as a multiple of S, over ``local`` ranks on each."""
    ranks = hosts * local
    return (2 * (hosts - 1) / hosts if kind == "all-reduce" else (ranks - 1) / ranks) / local


def _beyond(what: str, rows: Rows, num_bytes: float) -> str:
    first, last = rows[0][0], rows[-1][0]
    if first <= num_bytes <= last:
        return ""
    return f"{what} was measured from {first:,.0f} to {last:,.0f} bytes: others are extrapolated"


def _at_size(rows: Rows, num_bytes: float) -> float:
    size, seconds = rows[-1]
    return seconds * num_bytes / size if num_bytes > size else _interpolated(rows, num_bytes)


def _interpolated(points: Rows, at: float) -> float:
    """Interpolates in the logarithms of both; outside of the points, the nearest one's."""
    known, values = np.log(points).T
    return math.exp(np.interp(math.log(max(at, points[0][0])), known, values))
