"""How long a collective takes: by measured curves, or by two assumed numbers, bandwidth per rank and latency per call.

For S bytes over N ranks that each send W bytes per second, with ring algorithms and one latency o per all-reduce:

    all-reduce        o   + 2 (N-1)/N S/W          collective-permute    o/2 + S/W
    reduce-scatter    o/2 +   (N-1)/N S/W          all-to-all            o/2 + (N-1)/N S/W
    all-gather        o/2 +   (N-1)/N S/W          broadcast             o/2 + S/W

A group that spans H hosts with n ranks each communicates within hosts first and then between hosts with 1/n of the
bytes per rank: the same formula with n, S and the link's W, plus that with H, S/n and the host link's W. What is sent
from rank to rank directly has no first and second: an all-to-all sends (n-1)/N S within its host and (N-n)/N S to
others, a permutation S either way, and the slower of the two counts.

A measured network (``measured``, ``from_file``) has the times of collectives within a host by kind, ranks and bytes. A
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
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import nccl_tests
from .arguments import check_integer, is_number

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


_Row = tuple[str, int, float, float]  # kind, ranks, bytes of the full buffer, seconds
# (kind, ranks, rows of (bytes of the full buffer, seconds) by size)
Curves = tuple[tuple[str, int, tuple[tuple[float, float], ...]], ...]
_MEASURED = Path(__file__).with_name("measured_collectives.json")
_FASTEST_GB_PER_S = 10_000  # beyond it, times are in another unit
# Of these only an all-reduce of 8 was measured. The rest is taken from a chip whose links are so many times as fast. If
# this one's are slower, its switch does not sum either: an all-reduce is a reduce-scatter and an all-gather.
_LIKE = {"h200": ("h100", 1.0), "a100": ("h100", 1.5)}


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


def measured(spec: str, *, host_gb_per_s: float | None = None, fabric: str = "", without_own: bool = False) -> Network:
    """Gives the network of GPUs whose collectives were measured on one host, by a spec such as ``"h100:8"``.

    Between hosts, as in ``"h100:4x8"``, ``host_gb_per_s`` is what a rank sends; or ``fabric`` names what was measured:
    ``"a3mega"``, two hosts of 8 H100 with GPUDirect-TCPXO. ``without_own`` leaves out what was measured of an A100 or
    H200 itself, to see how far what is taken from the H100 carries.

    Raises:
        ValueError: If nothing was measured for the chip, or over the fabric with so many of them on each host.

    Example:
        >>> round(measured("h100:8").seconds("all-reduce", 2**20, range(8)) * 1e6, 1)
        51.9
    """
    parts = re.fullmatch(r"(\w+):(?:(\d+)x)?(\d+)", spec)
    if parts is None:
        raise ValueError(f"spec (={spec!r}) must be chip:devices or chip:hosts x devices, as in 'h100:8' or 'h100:4x8'")
    name, hosts, devices = parts.groups()
    found = _measurements()
    if not is_measured(name):
        raise ValueError(f"chip (={name!r}) must be one whose collectives were measured: {', '.join(found['us'])}")
    network = _of_rows(*_rows_of_chip(name, without_own))
    if fabric:
        table = found["fabrics"].get(fabric)
        if table is None or (name, int(devices)) != (table["chip"], table["devices_per_host"]):
            known = ", ".join(
                f"{name} of {one['chip']}:{one['devices_per_host']}" for name, one in found["fabrics"].items()
            )
            raise ValueError(f"fabric (={fabric!r}) must be one that was measured with {spec!r}: {known}")
        between = _of_rows(_rows_of_table(table["us"]), fabric)
        network = replace(network, fabric=between.curves, source=f"{network.source}, over hosts {table['source']}")
        host_gb_per_s = host_gb_per_s or table["gb_per_s"]
    if hosts not in (None, "1") and host_gb_per_s is None:
        raise ValueError(f"host_gb_per_s must be given for {spec!r}: nothing was measured between hosts")
    return replace(network, host_gb_per_s=host_gb_per_s, devices_per_host=int(devices))


def is_measured(chip: str) -> bool:
    """Whether ``measured`` knows a chip."""
    return chip in _measurements()["us"]


def _rows_of_chip(chip: str, without_own: bool) -> tuple[list[_Row], str]:
    """A chip's rows, and where they come from."""
    tables = _measurements()["us"]
    if chip not in _LIKE:
        return _rows_of_table(tables[chip]), f"XLA's own table of one host with {chip.upper()}"
    like, ratio = _LIKE[chip]
    others = {(kind, ranks, size / ratio): seconds for kind, ranks, size, seconds in _rows_of_table(tables[like])}
    if ratio != 1:
        gathers = {key[1:]: seconds for key, seconds in others.items() if key[0] == "all-gather"}
        scatters = {key[1:]: seconds for key, seconds in others.items() if key[0] == "reduce-scatter"}
        others = {key: seconds for key, seconds in others.items() if key[0] != "all-reduce"}
        others |= {("all-reduce", *key): gathers[key] + scatters[key] for key in gathers.keys() & scatters.keys()}
    own = [] if without_own else _rows_of_table(tables[chip])
    known = {row[:2] for row in own}
    taken = [(*key, seconds) for key, seconds in others.items() if key[:2] not in known]
    return own + taken, f"8 x {chip.upper()} (stas00/ml-engineering), the rest extrapolated from XLA's {like.upper()}"


@cache
def _measurements() -> Any:
    return json.loads(_MEASURED.read_text())


def from_file(path: str | Path) -> Network:
    """Reads measured collectives of one host.

    ``path`` is what nccl-tests printed, a run folder of ``python -m benchmarks collectives`` or ``nccl-tests``, its
    ``metrics.jsonl``, or a JSON object ``{"us": {kind: {ranks: [[bytes of the full buffer, microseconds], ...]}}}``.

    Raises:
        ValueError: If it holds no such rows, a single size, or times that do not grow.
        OSError: If it cannot be read.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        if file.suffix == ".jsonl":
            rows = _rows_of_run(json.loads(line) for line in file.read_text().splitlines() if line.strip())
        elif (text := file.read_text(errors="replace")).lstrip().startswith("{"):
            rows = _rows_of_table(json.loads(text)["us"])
        else:
            rows = _rows_of_output(nccl_tests.read_file(file))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"network file (={str(path)}) must hold measured collectives: {error!r}") from error
    return _of_rows(rows, str(path))


def _rows_of_table(table: Any) -> list[_Row]:
    return [
        (kind, int(ranks), float(size), us * 1e-6)
        for kind, by_ranks in table.items() for ranks, rows in by_ranks.items() for size, us in rows
    ]  # fmt: skip


def _rows_of_output(outputs: Iterable[nccl_tests.Output]) -> list[_Row]:
    outputs = list(outputs)
    if hosts := next((output.hosts for output in outputs if len(output.hosts) > 1), None):
        raise ValueError(f"its ranks are on {len(hosts)} hosts, where those of one are asked for")
    return [
        (output.collective.replace("_", "-"), len(output.gpus), float(line.num_bytes), line.time_us * 1e-6)
        for output in outputs if not output.num_wrong for line in output.lines if not line.num_wrong
    ]  # fmt: skip


def _rows_of_run(rows: Iterable[Any]) -> list[_Row]:
    right = (row for row in rows if row.get("check") == "ok" and row.get("collective") and row.get("median_ms"))
    return [
        (row["collective"].replace("_", "-"), int(row["num_ranks"]), float(row["size_bytes"]), row["median_ms"] * 1e-3)
        for row in right
    ]


def _of_rows(rows: Sequence[_Row], source: str) -> Network:
    """A network of curves; its two numbers are those of the most ranks' all-reduce, or of another kind without one.

    They are the rate of the largest size, and what the smallest from 1 MiB up takes beyond its bytes at that rate.
    """
    curves: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, ranks, size, seconds in rows:
        if kind in _VOLUMES:
            curves[kind, ranks][size].append(seconds)
    if not curves:
        raise ValueError(f"network file (={source}) must hold measured collectives: it has none")
    found: dict[tuple[str, int], tuple[tuple[float, float], ...]] = {}
    for (kind, ranks), times in sorted(curves.items()):
        curve = found[kind, ranks] = tuple((size, min(times[size])) for size in sorted(times))
        if len(curve) < 2 or curve[-1][1] <= curve[0][1] or min(min(row) for row in curve) <= 0 or ranks < 2:
            raise ValueError(f"{source}: {kind} of {ranks} ranks must have several sizes, with times that grow")
    kind, ranks = max(found, key=lambda key: (key[0] == "all-reduce", key[1]))
    size, seconds = found[kind, ranks][-1]
    sent = bus_factor(kind, ranks) * size
    small, small_s = next((row for row in found[kind, ranks][:-1] if row[0] >= 2**20), found[kind, ranks][0])
    latency_us = max(small_s - seconds * small / size, 0.0) * 1e6
    if sent / seconds > _FASTEST_GB_PER_S * GB:
        raise ValueError(f"{source}: times must be microseconds: {sent / seconds / GB:,.0f} GB/s a rank is no network")
    return Network(
        sent / seconds / GB, latency_us, curves=tuple((*key, rows) for key, rows in found.items()), source=source
    )


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
