"""Measured times of collectives: those of chips and fabrics that the package has, and files of others."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from . import nccl_tests
from .curves import GB, KINDS, Network, Rows, bus_factor

_Row = tuple[str, int, float, float]  # kind, ranks, bytes of the full buffer, seconds
_MEASURED = Path(__file__).with_name("measured_collectives.json")
_FASTEST_GB_PER_S = 10_000  # beyond it, times are in another unit
# Of these only an all-reduce of 8 was measured. The rest is taken from a chip whose links are so many times as fast. If
# this one's are slower, its switch does not sum either: an all-reduce is a reduce-scatter and an all-gather.
_LIKE = {"h200": ("h100", 1.0), "a100": ("h100", 1.5)}


def measured(spec: str, *, host_gb_per_s: float | None = None, fabric: str = "", without_own: bool = False) -> Network:
    """Gives the network of GPUs whose collectives were measured on one host, by a spec such as ``"h100:8"``.

    Args:
        spec: Chip and devices, or hosts x devices.
        host_gb_per_s: What a rank sends to other hosts, 10^9 bytes per second.
        fabric: Of what was measured between hosts: ``"a3mega"``, two hosts of 8 H100 with GPUDirect-TCPXO.
        without_own: Leaves out what was measured of an A100 or H200 itself, to see how far the H100's carries.

    Raises:
        ValueError: If nothing was measured for the chip, or over the fabric with so many of them on each host.
    """
    parts = re.fullmatch(r"(\w+):(?:(\d+)x)?(\d+)", str(spec))
    if parts is None:
        raise ValueError(f"spec (={spec!r}) must be chip:devices or chip:hosts x devices, as in 'h100:8' or 'h100:4x8'")
    chip, hosts, devices = parts.groups()
    if not is_measured(chip):
        known = ", ".join(_measurements()["us"])
        raise ValueError(f"chip (={chip!r}) must be one whose collectives were measured: {known}")
    network = _of_rows(*_rows_of_chip(chip, without_own))
    if fabric:
        fabrics = _measurements()["fabrics"]
        table = fabrics.get(fabric, {"chip": ""})
        if chip != table["chip"] or int(devices) != table["devices_per_host"]:
            known = ", ".join(f"{name} of {one['chip']}:{one['devices_per_host']}" for name, one in fabrics.items())
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


def from_file(path: str | Path) -> Network:
    """Reads measured collectives of one host.

    ``path`` is what nccl-tests printed or wrote as JSON, a run folder of ``python -m benchmarks collectives``,
    its ``metrics.jsonl``, or a JSON object of times of full buffers:
    ``{"us": {kind: {ranks: [[bytes, microseconds], ...]}}}``.

    Raises:
        ValueError: If it holds no such rows, a single size, or times that do not grow.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        text = file.read_text(errors="replace")
        if file.suffix == ".jsonl":
            rows = _rows_of_run(json.loads(line) for line in text.splitlines() if line.strip())
        else:
            table: Any = json.loads(text) if text.lstrip().startswith("{") else {"results": None}
            is_ours = "results" not in table
            rows = _rows_of_table(table["us"]) if is_ours else _rows_of_outputs(nccl_tests.read_file(file))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"network file (={str(path)}) must hold measured collectives: {error!r}") from error
    return _of_rows(rows, str(path))


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


def _rows_of_table(table: Any) -> list[_Row]:
    return [
        (kind, int(ranks), float(size), us * 1e-6)
        for kind, by_ranks in table.items() for ranks, rows in by_ranks.items() for size, us in rows
    ]  # fmt: skip


def _rows_of_outputs(outputs: Sequence[nccl_tests.Output]) -> list[_Row]:
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
    """A network of curves; its two numbers are those of the most ranks' all-reduce, or of another kind without one."""
    curves: dict[tuple[str, int], dict[float, float]] = defaultdict(dict)
    for kind, ranks, size, seconds in rows:
        if kind in KINDS:
            curves[kind, ranks][size] = min(seconds, curves[kind, ranks].get(size, seconds))
    if not curves:
        raise ValueError(f"network file (={source}) must hold measured collectives: it has none")
    found: dict[str, dict[int, Rows]] = defaultdict(dict)
    for (kind, ranks), times in sorted(curves.items()):
        curve = found[kind][ranks] = tuple(sorted(times.items()))
        if len(curve) < 2 or curve[-1][1] <= curve[0][1] or min(min(row) for row in curve) <= 0 or ranks < 2:
            raise ValueError(f"{source}: {kind} of {ranks} ranks must have several sizes, with times that grow")
    kind, ranks = max(curves, key=lambda key: (key[0] == "all-reduce", key[1]))
    # The rate of the largest size, and what the smallest from 1 MiB up takes beyond its bytes at that rate.
    *smaller, (size, seconds) = found[kind][ranks]
    bytes_per_s = bus_factor(kind, ranks) * size / seconds
    if bytes_per_s > _FASTEST_GB_PER_S * GB:
        raise ValueError(f"{source}: times must be microseconds: {bytes_per_s / GB:,.0f} GB/s a rank is no network")
    small, small_s = next((row for row in smaller if row[0] >= 2**20), smaller[0])
    latency_us = max(small_s - seconds * small / size, 0.0) * 1e6
    return Network(bytes_per_s / GB, latency_us, curves=dict(found), source=source)
