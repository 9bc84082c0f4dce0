"""What NVIDIA's nccl-tests print, or write as JSON (``-J``): the time of a collective by size.

    all_reduce_perf -b 1M -e 8G -f 2 -g 8

prints a line per size, of which the first four of the last eight numbers are of calls out of place, after comments that
name the program and each rank:

    # size  count  type  redop  root  time (us)  algbw (GB/s)  busbw (GB/s)  #wrong  time  algbw  busbw  #wrong

A text may hold the output of several programs, and its lines what launchers put before them. Programs whose collective
has no counterpart, sizes that were rounded down to 0 and calls with wrong results are left out; alone they are refused.
"""

import json
import re
from typing import Any, NamedTuple

PROGRAMS = {
    "all_reduce_perf": "all-reduce", "all_gather_perf": "all-gather", "reduce_scatter_perf": "reduce-scatter",
    "broadcast_perf": "broadcast", "reduce_perf": "reduce", "alltoall_perf": "all-to-all",
}  # fmt: skip
_PROGRAM = re.compile(rf"\b({'|'.join(PROGRAMS)}|(?:sendrecv|alltoallv|gather|scatter|hypercube)_perf)(?:_mpi)?\b")
# Not at the start of a line, where launchers and logs put numbers and times.
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b(?:.*\bon\s+(\S+)\s+device\b)?")
_SIZE = re.compile(r"(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s+[\d.]+\s+[\d.]+\s+(\d+|N/A)(?:\s+\S+){4}\s*$")


class Line(NamedTuple):
    """A size that a program printed."""

    kind: str  # of collective
    num_ranks: int
    num_hosts: int
    num_bytes: int  # of the full buffer
    time_us: float  # of a call


def parse(text: str, file_name: str = "") -> list[Line]:
    """Reads what programs printed, or one wrote as JSON; a ValueError or KeyError if it is not such output."""
    named = _PROGRAM.search(file_name)
    is_json = text.lstrip().startswith("{")
    found = _of_json(json.loads(text)) if is_json else _of_text(text, PROGRAMS.get(named[1]) if named else "")
    if not found or not all(line.kind and line.num_ranks for line in found):
        wanted = f"the name of its program, such as {', '.join(PROGRAMS)}, a line for each rank and one for each size"
        raise ValueError(f"it must be what nccl-tests printed, with {wanted}")
    return found


def _of_text(text: str, kind: str | None) -> list[Line]:
    """The sizes of all programs; ``kind`` is of those that do not name themselves, None of what is left out."""
    current, found = kind, []
    ranks, hosts = set[str](), set[str]()
    for line in text.splitlines():
        named = _PROGRAM.search(line)
        if (named or "# nThread" in line) and ranks:  # of the program before
            current, ranks, hosts = kind, set(), set()
        if named:
            current = PROGRAMS.get(named[1])
        elif rank := _RANK.search(line):
            ranks.add(rank[1])
            hosts.add(rank[2] or "")
        elif current is not None and (size := _SIZE.search(line)) and int(size[1]):
            if size[3] in ("0", "N/A"):
                found.append(Line(current, len(ranks), len(hosts), int(size[1]), float(size[2])))
    return found


def _of_json(found: Any) -> list[Line]:
    """The sizes of one program; without MPI its list of devices ends with the first of each process."""
    program = _PROGRAM.search(" ".join(found["args"][:1]))
    config, devices = found["config"], found["config"]["devices"]
    num_ranks = len(devices) * config["nthreads"] * config["ngpus"]
    num_hosts = len({one["hostname"] for one in devices})
    about = PROGRAMS.get(program[1], "") if program else "", num_ranks, num_hosts
    times = [(row["size"], row["out_of_place"]) for row in found["results"] if row["out_of_place"] and row["size"]]
    return [Line(*about, size, float(one["time"])) for size, one in times if not one["nwrong"]]
