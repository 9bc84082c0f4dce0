"""Measured times of collectives: those of chips and fabrics that the package has, and files of others."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from .curves import GB, KINDS, Network, Rows, bus_factor

_Row = tuple[str, int, float, float]  # collective, ranks, bytes of the full buffer, seconds
_Times = dict[tuple[str, int], dict[float, float]]  # by kind and ranks: bytes of the full buffer -> seconds
_MEASURED = Path(__file__).with_name("measured_collectives.json")
_FASTEST_GB_PER_S = 10_000  # beyond it, times are in another unit
# Of these only an all-reduce of 8 was measured. The rest is taken from a chip whose links are so many times as fast. If
# this one's are slower, its switch does not sum either: an all-reduce is a reduce-scatter and an all-gather.
_LIKE = {"h200": ("h100", 1.0), "a100": ("h100", 1.5)}
_PROGRAMS = {"sendrecv_perf": "send_recv", "alltoall_perf": "all_to_all"} | {
    f"{name}_perf": name for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
}
_PROGRAM = re.compile(rf"\b({'|'.join(_PROGRAMS)}|(?:alltoallv|gather|scatter|hypercube)_perf)(?:_mpi)?\b")
# Not at the start of a line, where launchers and logs put numbers and times.
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b(?:.*\bon\s+(\S+)\s+device\b)?")
_SIZE = re.compile(r"(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s+[\d.]+\s+[\d.]+\s+(\d+|N/A)(?:\s+\S+){4}\s*$")


def measured(spec: str, *, host_gb_per_s: float | None = None, fabric: str = "", without_own: bool = False) -> Network:
    """Gives the network of GPUs whose collectives were measured on one host; a ValueError if they were not.

    Args:
        spec: Chip and devices of one host, ``"h100:8"``, or hosts x devices, ``"h100:4x8"``.
        host_gb_per_s: What a rank sends to other hosts, 10^9 bytes per second; left out with a fabric.
        fabric: Of what was measured between hosts: ``"a3mega"``, two hosts of 8 H100 with GPUDirect-TCPXO.
        without_own: Leaves out what was measured of an A100 or H200 itself, to see how far the H100's carries.
    """
    chip, _, count = str(spec).partition(":")
    if chip not in (known := _measurements()["us"]):
        raise ValueError(f"chip (={chip!r}) must be one whose collectives were measured: {', '.join(known)}")
    network = _of_times(*_times_of_chip(chip, without_own))
    *hosts, devices = (int(number) if number.isdigit() else 0 for number in count.split("x"))
    most = max(max(by_ranks) for by_ranks in network.curves.values())
    if not 1 <= devices <= most:
        raise ValueError(f"spec (={spec!r}) must have 1 to {most} devices on a host: {chip}:{most} or {chip}:4x{most}")
    if fabric:
        table = _measurements()["fabrics"].get(fabric)
        if table is None or (chip, devices) != (table["chip"], table["devices_per_host"]):
            raise ValueError(f"fabric (={fabric!r}) must be one that was measured with {spec!r}: a3mega of h100:8")
        if host_gb_per_s is not None:
            raise ValueError(f"host_gb_per_s (={host_gb_per_s:g}) must be left out with {fabric!r}, which has times")
        source, host_gb_per_s = f"{network.source}, over hosts {table['source']}", table["gb_per_s"]
        network = replace(network, fabric=_of_times(_times_of_table(table["us"]), fabric).curves, source=source)
    if hosts not in ([], [1]) and host_gb_per_s is None:
        raise ValueError(f"host_gb_per_s must be given for {spec!r}: nothing was measured between hosts")
    return replace(network, host_gb_per_s=host_gb_per_s, devices_per_host=devices)


def from_file(path: str | Path) -> Network:
    """Reads measured collectives of one host; a ValueError if there are none, a single size, or times do not grow.

    ``path`` is what nccl-tests printed or wrote as JSON, a run folder of ``python -m benchmarks collectives`` or its
    ``metrics.jsonl``, or a JSON object of times of full buffers, ``{"us": {kind: {ranks: [[bytes, us], ...]}}}``.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        text = file.read_text(errors="replace")
        if file.suffix == ".jsonl":
            rows = [row for row in map(json.loads, text.splitlines()) if row["check"] == "ok" and row["median_ms"]]
            times = _shortest(
                (row["collective"], row["num_ranks"], row["size_bytes"], row["median_ms"] * 1e-3) for row in rows
            )
        elif text.lstrip().startswith("{"):
            found = json.loads(text)
            times = _times_of_table(found["us"]) if "us" in found else _shortest(_rows_of_json(found))
        else:
            times = _shortest(nccl_tests_rows(text, file.name))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"network file (={str(path)}) must hold measured collectives: {error!r}") from error
    return _of_times(times, str(path))


def nccl_tests_rows(text: str, file_name: str) -> list[_Row]:
    """Reads what programs of NVIDIA's nccl-tests printed on one host, which may be several, with logs between them.

    A line per size ends with eight numbers, of which the first four are of calls out of place:

        # size  count  type  redop  root  time (us)  algbw (GB/s)  busbw (GB/s)  #wrong  time  algbw  busbw  #wrong
    """
    named = _PROGRAM.search(file_name)
    # The collective of programs that do not name themselves, and of what follows; None of what is left out.
    current = unnamed = _PROGRAMS.get(named[1]) if named else ""
    found: list[_Row] = []
    ranks, hosts = set[str](), set[str]()
    for line in text.splitlines():
        named = _PROGRAM.search(line)
        if (named or "# nThread" in line) and ranks:  # of the program before
            current, ranks, hosts = unnamed, set(), set()
        if named:
            current = _PROGRAMS.get(named[1])
        elif rank := _RANK.search(line):
            ranks.add(rank[1])
            hosts.add(rank[2] or "")
        elif current is not None and (size := _SIZE.search(line)) and int(size[1]):
            if len(hosts) > 1:
                raise ValueError(f"its ranks are on {len(hosts)} hosts, where those of one are asked for")
            if size[3] in ("0", "N/A"):  # wrong values, or not checked
                found.append((current, len(ranks), int(size[1]), float(size[2]) * 1e-6))
    if not found or not all(collective and num_ranks for collective, num_ranks, *_ in found):
        wanted = f"the name of its program, such as {', '.join(_PROGRAMS)}, a line for each rank and one for each size"
        raise ValueError(f"it must be what nccl-tests printed, with {wanted}")
    return found


def _rows_of_json(found: Any) -> list[_Row]:
    """Reads what one of the programs wrote with ``-J``; without MPI its devices end with the first of each process."""
    program = _PROGRAM.search(" ".join(found["args"][:1]))
    config, devices = found["config"], found["config"]["devices"]
    if len(hosts := {one["hostname"] for one in devices}) > 1:
        raise ValueError(f"its ranks are on {len(hosts)} hosts, where those of one are asked for")
    about = _PROGRAMS[program[1]] if program else "", len(devices) * config["nthreads"] * config["ngpus"]
    times = [(row["size"], row["out_of_place"]) for row in found["results"] if row["out_of_place"] and row["size"]]
    return [(*about, size, float(one["time"]) * 1e-6) for size, one in times if not int(one["nwrong"] or 0)]


@cache
def _measurements() -> Any:
    return json.loads(_MEASURED.read_text())


def _times_of_chip(chip: str, without_own: bool) -> tuple[_Times, str]:
    """A chip's times, and where they come from."""
    tables = _measurements()["us"]
    own = {} if without_own and chip in _LIKE else _times_of_table(tables[chip])
    if chip not in _LIKE:
        return own, f"XLA's own table of one host with {chip.upper()}"
    like, ratio = _LIKE[chip]
    others = _times_of_table(tables[like])
    if ratio != 1:
        for kind, ranks in others:
            gathers, scatters = others["all-gather", ranks], others["reduce-scatter", ranks]
            if kind == "all-reduce":
                others[kind, ranks] = {size: gathers[size] + scatters[size] for size in gathers.keys() & scatters}
    slower = {key: {size / ratio: seconds for size, seconds in times.items()} for key, times in others.items()}
    source = f"8 x {chip.upper()} (stas00/ml-engineering), the rest extrapolated from XLA's {like.upper()}"
    return slower | own, source


def _times_of_table(table: Any) -> _Times:
    return _shortest(
        (kind, int(ranks), float(size), us * 1e-6)
        for kind, by_ranks in table.items() for ranks, rows in by_ranks.items() for size, us in rows
    )  # fmt: skip


def _shortest(rows: Iterable[_Row]) -> _Times:
    times: _Times = defaultdict(dict)
    for name, ranks, size, seconds in rows:
        of_sizes = times[name.replace("_", "-"), ranks]
        of_sizes[size] = min(seconds, of_sizes.get(size, seconds))
    return dict(times)


def _of_times(times: _Times, source: str) -> Network:
    """A network of curves; its two numbers are those of the most ranks' all-reduce, or of another kind without one."""
    curves: dict[str, dict[int, Rows]] = defaultdict(dict)
    for (kind, ranks), by_size in sorted(times.items()):
        if kind not in KINDS:
            continue
        # A larger buffer takes no less: what a smaller one took beyond that was warming up, or other work.
        least = [*accumulate((by_size[size] for size in sorted(by_size, reverse=True)), min)]
        curve = tuple(zip(sorted(by_size), reversed(least), strict=True))
        is_positive = all(0 < one < math.inf for row in by_size.items() for one in row)
        if not is_positive or ranks < 2 or len(curve) < 2 or curve[-1][1] <= curve[0][1]:
            raise ValueError(f"{source}: {kind} of {ranks} ranks must have several sizes, with times that grow")
        curves[kind][ranks] = curve
    if not curves:
        raise ValueError(f"network file (={source}) must hold measured collectives: it has none")
    kind = "all-reduce" if "all-reduce" in curves else next(iter(curves))
    ranks = max(curves[kind])
    # The rate of the largest size, and what the smallest from 1 MiB up takes beyond its bytes at that rate.
    *smaller, (size, seconds) = curves[kind][ranks]
    bytes_per_s = bus_factor(kind, ranks) * size / seconds
    if bytes_per_s > _FASTEST_GB_PER_S * GB:
        raise ValueError(f"{source}: times must be microseconds: {bytes_per_s / GB:,.0f} GB/s a rank is no network")
    small, small_s = next((row for row in smaller if row[0] >= 2**20), smaller[0])
    latency_us = max(small_s - seconds * small / size, 0.0) * 1e6
    return Network(bytes_per_s / GB, latency_us, curves=dict(curves), source=source)
