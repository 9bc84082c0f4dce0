"""Rows of NVIDIA's nccl-tests, where its programs are installed or from files: what NCCL does without a framework.

    all_reduce_perf -b 1048576 -e 1048576 -g 8

prints a line per size, of which the first four of the last eight numbers are of calls out of place, after comments that
name the program and each rank:

    # size  count  type  redop  root  time (us)  algbw (GB/s)  busbw (GB/s)  #wrong  time  algbw  busbw  #wrong
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.run import FAILED
from .cases import PRIMITIVES, rates, size_of

NAME = "nccl-tests"
_PROGRAMS = {name: f"{name.replace('send_recv', 'sendrecv')}_perf" for name in PRIMITIVES}
_DTYPES = {"float": "float32", "half": "float16", "double": "float64"}
_TIMEOUT_S = 300.0
_NUM_FIELDS = 13


def installed(names: Sequence[str]) -> dict[str, str]:
    """Finds the programs of collectives, by the collective."""
    found = {name: shutil.which(_PROGRAMS[name]) for name in names if name in _PROGRAMS}
    return {name: path for name, path in found.items() if path}


def rows(programs: Mapping[str, str], sizes: Sequence[int], num_gpus: int) -> Iterator[dict[str, Any]]:
    """Runs the programs on GPUs of this host, by one process, and makes a row of each collective and size.

    ``programs`` are by collective, as ``installed`` gives them; ``sizes`` are bytes of the full buffer.
    """
    common = _common(num_gpus)
    for name, program in programs.items():
        for asked in sizes:
            row = common | {"collective": name, "asked_bytes": asked, "dtype": "float32"}
            num_bytes = str(size_of(name, asked, num_gpus))
            command = [program, "-b", num_bytes, "-e", num_bytes, "-g", str(num_gpus), "-d", "float", "-n", "20"]
            try:
                said = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
                yield row | read(said, name, num_gpus)
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                yield row | {"check": f"{FAILED}{error}"}


def read_file(path: str) -> list[dict[str, Any]]:
    """Reads what a program printed: a row for each size, with bandwidths by the formulas of this benchmark.

    Raises:
        ValueError: If it is not such output, whole from its first line on.
        OSError: If it cannot be read.
    """
    text = Path(path).read_text(errors="replace")
    asked = re.search("|".join(_PROGRAMS.values()), text) or re.search("|".join(_PROGRAMS.values()), Path(path).name)
    ranks = dict(re.findall(r"^#\s+Rank\s+(\d+)\b.*?(?:\]\s*(.*\S))?\s*$", text, re.MULTILINE))  # their GPUs
    if asked is None or not ranks:
        what = "the name of its program" if asked is None else "a line for each rank"
        raise ValueError(f"file {path!r} must be what nccl-tests printed, and has not {what}")
    name = next(name for name, program in _PROGRAMS.items() if program == asked[0])
    common = _common(len(ranks)) | {"collective": name, "device": next(iter(ranks.values())) or "GPU"}
    if not (found := [_row(fields, name, len(ranks)) for fields in _lines(text)]):
        raise ValueError(f"file {path!r} must be what nccl-tests printed, and has no line of a size")
    if outside := re.search(r"Out of bounds values\s*:\s*([1-9]\d*)", text):
        common["check"] = f"WRONG: {outside[1]} values of the file"
    return [{"asked_bytes": row["size_bytes"]} | row | common for row in found]


def read(output: str, name: str, num_ranks: int) -> dict[str, Any]:
    """Reads the line of the one size that a program was asked for; raises ValueError if there is none.

    Example:
        >>> line = "  1048576  262144  float  sum  -1  29.97  34.99  61.23  0  29.89  35.08  61.39  0"
        >>> round(read(line, "all_reduce", 8)["busbw_gb_per_s"], 2)
        61.23
    """
    if len(of_sizes := _lines(output)) != 1:
        raise ValueError(f"nccl-tests printed {len(of_sizes)} lines of sizes, not 1: {output[-200:]!r}")
    return _row(of_sizes[0], name, num_ranks)


def _common(num_ranks: int) -> dict[str, Any]:
    return {"framework": NAME, "backend": "NCCL, nccl-tests", "kind": "gpus", "num_ranks": num_ranks}


def _lines(output: str) -> list[list[str]]:
    """The fields of the lines of sizes."""
    lines = [line.split() for line in output.splitlines() if not line.startswith("#")]
    return [fields for fields in lines if len(fields) == _NUM_FIELDS and fields[0].isdigit()]


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
        "check": f"WRONG: {wrong} values" if is_count and int(wrong) else "ok",
    }
