"""What NVIDIA's nccl-tests print, or write as JSON (``-J``): the time of a collective by size.

    all_reduce_perf -b 1M -e 8G -f 2 -g 8

prints a line per size, of which the first four of the last eight numbers are of calls out of place, after comments that
name the program and each rank:

    # size  count  type  redop  root  time (us)  algbw (GB/s)  busbw (GB/s)  #wrong  time  algbw  busbw  #wrong

A text may hold the output of several programs, and its lines what launchers put before them. Programs whose collective
has no counterpart, sizes that were rounded down to 0 and wrong results are left out; alone they are refused.
"""

import json
import re
from pathlib import Path
from typing import Any

Row = tuple[str, int, int, float]  # collective, ranks, bytes of the full buffer, seconds of a call
_SPELT = {"sendrecv": "send_recv", "alltoall": "all_to_all"}
PROGRAMS = {
    f"{name}_perf": _SPELT.get(name, name)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "sendrecv", "alltoall")
}
_PROGRAM = re.compile(rf"\b({'|'.join(PROGRAMS)}|(?:alltoallv|gather|scatter|hypercube)_perf)(?:_mpi)?\b")
# Not at the start of a line, where launchers and logs put numbers and times.
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b(?:.*\bon\s+(\S+)\s+device\b)?")
_SIZE = re.compile(r"(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s+[\d.]+\s+[\d.]+\s+(\d+|N/A)(?:\s+\S+){4}\s*$")


def read_file(path: Path) -> list[Row]:
    """Reads what programs printed on one host, or one wrote as JSON; a ValueError if it is not such output."""
    text, named = path.read_text(errors="replace"), _PROGRAM.search(path.name)
    if text.lstrip().startswith("{"):
        found, num_hosts = _of_json(json.loads(text))
    else:
        found, num_hosts = _of_text(text, PROGRAMS.get(named[1]) if named else "")
    if not found or not all(collective and num_ranks for collective, num_ranks, *_ in found):
        wanted = f"the name of its program, such as {', '.join(PROGRAMS)}, a line for each rank and one for each size"
        raise ValueError(f"it must be what nccl-tests printed, with {wanted}")
    if num_hosts > 1:
        raise ValueError(f"its ranks are on {num_hosts} hosts, where those of one are asked for")
    return found


def _of_text(text: str, collective: str | None) -> tuple[list[Row], int]:
    """The sizes and the hosts of all programs; ``collective`` is of those without a name, None of what is left out."""
    current, found, most = collective, [], 0
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
            most = max(most, len(hosts))
            if size[3] in ("0", "N/A"):  # wrong values, or not checked
                found.append((current, len(ranks), int(size[1]), float(size[2]) * 1e-6))
    return found, most


def _of_json(found: Any) -> tuple[list[Row], int]:
    """The sizes of one program; without MPI its list of devices ends with the first of each process."""
    program = _PROGRAM.search(" ".join(found["args"][:1]))
    config, devices = found["config"], found["config"]["devices"]
    about = PROGRAMS.get(program[1], "") if program else "", len(devices) * config["nthreads"] * config["ngpus"]
    times = [(row["size"], row["out_of_place"]) for row in found["results"] if row["out_of_place"] and row["size"]]
    rows = [(*about, size, float(one["time"]) * 1e-6) for size, one in times if not int(one["nwrong"] or 0)]
    return rows, len({one["hostname"] for one in devices})
