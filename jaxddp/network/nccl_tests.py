"""What NVIDIA's nccl-tests print, or write as JSON (``-J``): the time of a collective by size.

    all_reduce_perf -b 1M -e 8G -f 2 -g 8

prints a line per size, of which the first four of the last eight numbers are of calls out of place, after comments that
name the program and each rank:

    # size  count  type  redop  root  time (us)  algbw (GB/s)  busbw (GB/s)  #wrong  time  algbw  busbw  #wrong

A text may hold the output of several programs, and its lines what launchers put before them.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PROGRAMS = {
    f"{name}_perf": name.replace("sendrecv", "send_recv")
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "sendrecv")
}
_PROGRAM = re.compile(rf"\b({'|'.join(PROGRAMS)})(?:_mpi)?\b")
_CONCLUDED = "# Collective test concluded"
# Not at the start of a line, where launchers and logs put numbers and times.
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b(?:.*\bon\s+(\S+)\s+device\b)?.*?(?:\]\s*(.*\S))?\s*$")
_OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")
_SIZE = re.compile(r"(\d+)\s+\d+\s+(\w+)\s+\w+\s+-?\d+\s+([\d.]+)\s+[\d.]+\s+[\d.]+\s+(\S+)(?:\s+\S+){4}\s*$")


class Line(NamedTuple):
    """A size."""

    num_bytes: int  # of the full buffer
    dtype: str  # as NCCL spells it
    time_us: float  # of a call
    num_wrong: int  # values; 0 where nothing was checked, or an older release prints the largest error


@dataclass
class Output:
    """What one program printed."""

    collective: str = ""
    gpus: dict[str, str] = field(default_factory=dict)  # of its ranks
    hosts: set[str] = field(default_factory=set)
    lines: list[Line] = field(default_factory=list)
    num_wrong: int = 0


def read_file(path: str | Path) -> list[Output]:
    """Reads what programs printed, or one wrote as JSON; a ValueError if it is not such output, or is cut."""
    text, named = Path(path).read_text(errors="replace"), _PROGRAM.search(Path(path).name)
    try:
        if text.lstrip().startswith("{"):
            found = [_of_json(json.loads(text))]
        else:
            found = read_text(text, PROGRAMS[named[1]] if named else "")
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"file {str(path)!r} must be what nccl-tests wrote as JSON: {error!r}") from error
    for output in found:
        parts = {"the name of its program": output.collective, "a line for each rank": output.gpus,
                 "a line of a size": output.lines}  # fmt: skip
        if missing := [name for name, part in parts.items() if not part]:
            raise ValueError(f"file {str(path)!r} must be what nccl-tests printed, and lacks {missing[0]}")
    return found


def read_text(text: str, collective: str) -> list[Output]:
    """Divides a text into the outputs of programs; ``collective`` is of those that do not name themselves."""
    found = [Output(collective)]
    for line in text.splitlines():
        if _CONCLUDED in line:  # the last line of one, which names its program again
            continue
        current = found[-1]
        named = _PROGRAM.search(line)
        if (named or "# nThread" in line) and (current.gpus or current.lines):
            found.append(current := Output(collective))
        if named:
            current.collective = PROGRAMS[named[1]]
        elif rank := _RANK.search(line):
            current.gpus[rank[1]] = rank[3] or ""
            current.hosts.add(rank[2] or "")
        elif outside := _OUT_OF_BOUNDS.search(line):
            current.num_wrong += int(outside[1])
        elif size := _SIZE.search(line):
            num_wrong = int(size[4]) if size[4].isdigit() else 0
            current.lines.append(Line(int(size[1]), size[2], float(size[3]), num_wrong))
    return found


def _of_json(found: Any) -> Output:
    """The output of one program; without MPI its list of devices ends with the first."""
    program = _PROGRAM.search(" ".join(found["args"][:1]))
    config, devices = found["config"], found["config"]["devices"]
    names = [one["device_info"] for one in devices for _ in range(config["nthreads"] * config["ngpus"])]
    lines = [
        Line(row["size"], row["type"], float(row["out_of_place"]["time"]), int(row["out_of_place"]["nwrong"] or 0))
        for row in found["results"] if row["out_of_place"]
    ]  # fmt: skip
    return Output(
        PROGRAMS[program[1]] if program else "", {str(rank): name for rank, name in enumerate(names)},
        {one["hostname"] for one in devices}, lines, int(found["out_of_bounds"]["count"]),
    )  # fmt: skip
