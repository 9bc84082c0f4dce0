"""Rows of NVIDIA's nccl-tests, where its programs are installed or from files: what NCCL does without a framework.

    all_reduce_perf -b 1048576 -e 1048576 -g 8

prints a line per size, of which the first four of the last eight numbers are of calls out of place, after comments that
name the program and each rank:

    # size  count  type  redop  root  time (us)  algbw (GB/s)  busbw (GB/s)  #wrong  time  algbw  busbw  #wrong

A file may hold the output of several programs, and its lines what launchers put before them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .benchmark import FAILED, WRONG
from .collective_cases import PRIMITIVES, rates, size_of

NAME = "nccl-tests"
_PROGRAMS = {f"{name.replace('send_recv', 'sendrecv')}_perf": name for name in PRIMITIVES}
_DTYPES = {"float": "float32", "half": "float16", "double": "float64"}
_TIMEOUT_S = 300.0
_NUM_FIELDS = 13
# Open MPI's --tag-output, srun's --label, and times of a log.
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_PREFIX = re.compile(
    r"\s*(?:\[\d+,\d+\]<std(?:out|err)>:|\d+:(?=\s)"
    rf"|\[?(?:\d{{4}}-\d\d-\d\d[T ])?{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\]?:?(?=\s))"
)
_PROGRAM = re.compile(rf"\b({'|'.join(_PROGRAMS)})\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?(?:\]\s*(.*\S))?\s*$")
_OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")


@dataclass
class _Output:
    """What one program printed: its collective, its ranks' GPUs, and the fields of its lines of sizes."""

    collective: str = ""
    gpus: dict[str, str] = field(default_factory=dict)
    lines: list[list[str]] = field(default_factory=list)
    num_wrong: int = 0


def installed(names: Sequence[str]) -> dict[str, str]:
    """Finds the programs of collectives, by the collective."""
    found = {name: shutil.which(program) for program, name in _PROGRAMS.items() if name in names}
    return {name: path for name, path in found.items() if path}


def run_programs(programs: dict[str, str], sizes: Sequence[int], num_gpus: int) -> Iterator[dict[str, Any]]:
    """Runs the programs on GPUs of this host, by one process, and makes a row of each collective and size.

    ``programs`` are by collective, as ``installed`` gives them; ``sizes`` are bytes of the full buffer.
    """
    for name, program in programs.items():
        for asked in sizes:
            num_bytes = str(size_of(name, asked, num_gpus))
            command = [program, "-b", num_bytes, "-e", num_bytes, "-g", str(num_gpus), "-d", "float", "-n", "20"]
            row = _common(num_gpus) | {"collective": name, "asked_bytes": asked}
            try:
                said = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
                (output,) = _outputs(said, name)
                (line,) = output.lines
                yield row | _row(line, name, num_gpus)
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                yield row | {"check": f"{FAILED}{error}"}


def read_file(path: str) -> list[dict[str, Any]]:
    """Reads what programs printed: a row for each size, with bandwidths by the formulas of this benchmark.

    Raises:
        ValueError: If it is not such output, whole from its first line on.
        OSError: If it cannot be read.
    """
    named = _PROGRAM.search(Path(path).name)
    rows = []
    for output in _outputs(Path(path).read_text(errors="replace"), _PROGRAMS[named[1]] if named else ""):
        missing = (
            "the name of its program" if not output.collective
            else "a line for each rank" if not output.gpus
            else "a line of a size" if not output.lines
            else ""
        )  # fmt: skip
        if missing:
            raise ValueError(f"file {path!r} must be what nccl-tests printed, and lacks {missing}")
        name, num_ranks = output.collective, len(output.gpus)
        common = _common(num_ranks) | {"device": next(iter(output.gpus.values())) or "GPU"}
        for line in output.lines:
            row = common | {"collective": name} | _row(line, name, num_ranks)
            wrong = {"check": f"{WRONG}{output.num_wrong} values of the program"} if output.num_wrong else {}
            rows.append({"asked_bytes": row["size_bytes"]} | row | wrong)
    return rows


def _outputs(text: str, collective: str) -> list[_Output]:
    """Divides a text into the outputs of programs; ``collective`` is of those that do not name themselves."""
    found = [_Output(collective)]
    for raw in text.splitlines():
        line = raw
        while prefix := _PREFIX.match(line):
            line = line[prefix.end() :]
        line = line.strip()
        current = found[-1]
        named = _PROGRAM.search(line)
        if (named or line.startswith("# nThread")) and (current.gpus or current.lines):
            found.append(current := _Output(collective))
        if named:
            current.collective = _PROGRAMS[named[1]]
        elif rank := _RANK.match(line):
            current.gpus[rank[1]] = rank[2] or ""
        elif outside := _OUT_OF_BOUNDS.match(line):
            current.num_wrong += int(outside[1])
        elif not line.startswith("#"):
            fields = line.split()
            if len(fields) == _NUM_FIELDS and fields[0].isdigit():
                current.lines.append(fields)
    return found


def _common(num_ranks: int) -> dict[str, Any]:
    return {"framework": NAME, "backend": "NCCL, nccl-tests", "num_ranks": num_ranks, "dtype": "float32"}


def _row(fields: Sequence[str], name: str, num_ranks: int) -> dict[str, Any]:
    num_bytes, _, dtype, _, _, time_us, _, _, wrong = fields[:9]
    # The bandwidths that it prints are rounded to 0.01 GB/s, so that small sizes have none.
    is_count = wrong.isdigit()  # older releases print the largest error; N/A: not checked
    algbw, busbw = rates(name, int(num_bytes), float(time_us) * 1e-6, num_ranks)
    return {
        "size_bytes": int(num_bytes),
        "dtype": _DTYPES.get(dtype, dtype),
        "in_a_row_us": float(time_us),
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": busbw,
        "check": f"{WRONG}{wrong} values" if is_count and int(wrong) else "ok",
    }
