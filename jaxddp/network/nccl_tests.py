"""What NVIDIA's nccl-tests print: the time of a collective by size.

    all_reduce_perf -b 1M -e 8G -f 2 -g 8

prints a line per size, of which the first four of the last eight numbers are of calls out of place, after comments that
name the program and each rank:

    # size  count  type  redop  root  time (us)  algbw (GB/s)  busbw (GB/s)  #wrong  time  algbw  busbw  #wrong

A text may hold the output of several programs, and its lines what launchers put before them. Programs whose collective
has no counterpart, sizes that were rounded down to 0 and wrong results are left out; alone they are refused.
"""

import re
from pathlib import Path

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
    """Reads what programs printed on one host; a ValueError if it is not such output."""
    named = _PROGRAM.search(path.name)
    unnamed = PROGRAMS.get(named[1]) if named else ""  # the collective of programs that do not name themselves
    current, found = unnamed, []  # None of what is left out
    ranks, hosts = set[str](), set[str]()
    for line in path.read_text(errors="replace").splitlines():
        named = _PROGRAM.search(line)
        if (named or "# nThread" in line) and ranks:  # of the program before
            current, ranks, hosts = unnamed, set(), set()
        if named:
            current = PROGRAMS.get(named[1])
        elif rank := _RANK.search(line):
            ranks.add(rank[1])
            hosts.add(rank[2] or "")
        elif current is not None and (size := _SIZE.search(line)) and int(size[1]):
            if len(hosts) > 1:
                raise ValueError(f"its ranks are on {len(hosts)} hosts, where those of one are asked for")
            if size[3] in ("0", "N/A"):  # wrong values, or not checked
                found.append((current, len(ranks), int(size[1]), float(size[2]) * 1e-6))
    if not found or not all(collective and num_ranks for collective, num_ranks, *_ in found):
        wanted = f"the name of its program, such as {', '.join(PROGRAMS)}, a line for each rank and one for each size"
        raise ValueError(f"it must be what nccl-tests printed, with {wanted}")
    return found
