"""What NVIDIA's nccl-tests print, or write as JSON (``-J``): the time of a collective by size.

    all_reduce_perf -b 1M -e 8G -f 2 -g 8

prints a line per size, of which the first four of the last eight numbers are of calls out of place, after comments that
name the program and each rank:

    # size  count  type  redop  root  time (us)  algbw (GB/s)  busbw (GB/s)  #wrong  time  algbw  busbw  #wrong

A text may hold the output of several programs, and its lines what launchers put before them. Programs whose collective
has no counterpart, and sizes that were rounded down to 0, are left out; alone they are refused.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

_SPELT = {"sendrecv": "send_recv", "alltoall": "all_to_all"}
PROGRAMS = {
    f"{name}_perf": _SPELT.get(name, name)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "sendrecv", "alltoall")
}
_PROGRAM = re.compile(rf"\b({'|'.join(PROGRAMS)}|(?:alltoallv|gather|scatter|hypercube)_perf)(?:_mpi)?\b")
# Not at the start of a line, where launchers and logs put numbers and times.
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b(?:.*\bon\s+(\S+)\s+device\b)?")
_SIZE = re.compile(r"(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s+[\d.]+\s+[\d.]+\s+(\d+|N/A)(?:\s+\S+){4}\s*$")


class Line(NamedTuple):
    """A size that a program printed."""

    collective: str
    num_ranks: int
    num_hosts: int
    num_bytes: int  # of the full buffer
    time_us: float  # of a call
    num_wrong: int  # values; 0 where nothing was checked


def read_file(path: str | Path) -> list[Line]:
    """Reads what programs printed, or one wrote as JSON; a ValueError if it is not such output."""
    text, named = Path(path).read_text(errors="replace"), _PROGRAM.search(Path(path).name)
    try:
        if text.lstrip().startswith("{"):
            found = _of_json(json.loads(text))
        else:
            found = _of_text(text, PROGRAMS.get(named[1]) if named else "")
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"file {str(path)!r} must be what nccl-tests wrote as JSON: {error!r}") from error
    if not found or not all(line.collective and line.num_ranks for line in found):
        wanted = f"the name of its program, such as {', '.join(PROGRAMS)}, a line for each rank and one for each size"
        raise ValueError(f"file {str(path)!r} must be what nccl-tests printed, with {wanted}")
    return found


def _of_text(text: str, collective: str | None) -> list[Line]:
    """The sizes of all programs; ``collective`` is of those that do not name themselves, None of what is left out."""
    current, found = collective, []
    ranks, hosts = set[str](), set[str]()
    for line in text.splitlines():
        named = _PROGRAM.search(line)
        if (named or "# nThread" in line) and ranks:  # of the program before
            current, ranks, hosts = collective, set(), set()
        if named:
            current = PROGRAMS.get(named[1])
        elif rank := _RANK.search(line):
            ranks.add(rank[1])
            hosts.add(rank[2] or "")
        elif current is not None and (size := _SIZE.search(line)) and int(size[1]):
            num_wrong = 0 if size[3] == "N/A" else int(size[3])
            found.append(Line(current, len(ranks), len(hosts), int(size[1]), float(size[2]), num_wrong))
    return found


def _of_json(found: Any) -> list[Line]:
    """The sizes of one program; without MPI its list of devices ends with the first of each process."""
    program = _PROGRAM.search(" ".join(found["args"][:1]))
    config, devices = found["config"], found["config"]["devices"]
    num_ranks = len(devices) * config["nthreads"] * config["ngpus"]
    num_hosts = len({one["hostname"] for one in devices})
    about = PROGRAMS.get(program[1], "") if program else "", num_ranks, num_hosts
    times = [(row, row["out_of_place"]) for row in found["results"] if row["out_of_place"] and row["size"]]
    return [Line(*about, row["size"], float(of["time"]), int(of["nwrong"] or 0)) for row, of in times]
