"""What processes use, as Linux tells it, and whether that grows. No framework is imported: the guard starts at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

MARK = "JAXDDP_SOAK"  # in the environment of every process that a soak starts
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WARM_UP_S, _SHORTEST_S = 60.0, 180.0  # of a life
MEASURED = ("memory_mib", "handles", "threads")
# Growth over a life that is called flat: of memory a share, as pages that were freed are kept and reused.
MEMORY_SHARE, NUM_HANDLES, NUM_THREADS = 0.05, 2.0, 2.0


def is_alive(pid: int) -> bool:
    """Whether a process runs or is stopped; one that has ended and was not waited for is not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def usage_of(pid: int) -> dict[str, float] | None:
    """Resident memory in MiB, open file handles and threads of a process; None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        counts = [len(os.listdir(f"/proc/{pid}/{folder}")) for folder in ("fd", "task")]
    except (OSError, IndexError):
        return None
    return dict(zip(MEASURED, (pages * _PAGE_BYTES / 2**20, *counts), strict=True)) if pages else None


def marked_processes(mark: str) -> set[int]:
    """The processes that a soak started, whoever their parents are."""
    wanted, found = f"{MARK}={mark}".encode(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if wanted in (folder / "environ").read_bytes().split(b"\0") and is_alive(int(folder.name)):
                found.add(int(folder.name))
    return found


def children(pid: int) -> set[int]:
    """The processes that a process started."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, path.read_text().split()))
    return found


def descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that they did."""
    return {one for child in children(pid) for one in (child, *descendants(child))}


def listening_ports(pids: Iterable[int]) -> set[int]:
    """TCP ports at which processes listen."""
    sockets = set()
    for path in (path for pid in pids for path in Path(f"/proc/{pid}/fd").glob("*")):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(path))
    tables = (path.read_text() for name in ("tcp", "tcp6") if (path := Path("/proc/self/net", name)).exists())
    rows = [line.split() for table in tables for line in table.splitlines()]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def shared_memory() -> set[str]:
    """Files of /dev/shm that no process has mapped."""
    folder, maps = Path("/dev/shm"), b""
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    for path in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            maps += path.read_bytes()
    return {name for name in names if f"/dev/shm/{name}".encode() not in maps}


def longest_lives(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each role the process that lived longest: the median of what it used, how it grew, and whether that is flat.

    Growth is the slope of a least-squares line over the life, without its first minute, times its length.
    """
    lives: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for sample in samples:
        lives.setdefault((sample["role"], sample["pid"]), []).append(sample)
    longest: dict[str, list[Mapping[str, Any]]] = {}
    for (role, _), life in lives.items():
        if _length_s(life) >= _length_s(longest.get(role, life)):
            longest[role] = life
    return [{"role": role} | _growth(life) for role, life in longest.items()]


def _growth(life: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    warm = [one for one in life if one["at_s"] - life[0]["at_s"] >= _WARM_UP_S]
    found: dict[str, Any] = {"lived_s": _length_s(life)}
    if found["lived_s"] < _SHORTEST_S:
        return found | {"check": "too short to judge"}
    times = np.array([one["at_s"] for one in warm])
    for name in MEASURED:
        values = [one[name] for one in warm]
        found[name] = median(values)
        found[f"{name}_growth"] = float(np.polyfit(times - times[0], values, 1)[0]) * _length_s(warm)
    limits = (MEMORY_SHARE * found["memory_mib"], NUM_HANDLES, NUM_THREADS)
    grown = [name for name, limit in zip(MEASURED, limits, strict=True) if found[f"{name}_growth"] > limit]
    return found | {"check": f"WRONG: {', '.join(grown)} grow" if grown else "flat"}


def _length_s(life: Sequence[Mapping[str, Any]]) -> float:
    return life[-1]["at_s"] - life[0]["at_s"]
