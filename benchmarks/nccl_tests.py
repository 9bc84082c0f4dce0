"""Rows of NVIDIA's nccl-tests, where its programs are installed or from files: what NCCL does without a framework."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from jaxddp.network.nccl_tests import PROGRAMS, Line, read_text
from jaxddp.network.nccl_tests import read_file as read_outputs

from .benchmark import FAILED, WRONG
from .collective_cases import rates, size_of

NAME = "nccl-tests"
_DTYPES = {"float": "float32", "half": "float16", "double": "float64"}
_TIMEOUT_S = 300.0


def installed(names: Sequence[str]) -> dict[str, str]:
    """Finds the programs of collectives, by the collective."""
    found = {name: shutil.which(program) for program, name in PROGRAMS.items() if name in names}
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
                (output,) = read_text(said, name)
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
    rows = []
    for output in read_outputs(path):
        name, num_ranks = output.collective, len(output.gpus)
        common = _common(num_ranks) | {"device": next(iter(output.gpus.values())) or "GPU"}
        for line in output.lines:
            row = common | {"collective": name} | _row(line, name, num_ranks)
            wrong = {"check": f"{WRONG}{output.num_wrong} values of the program"} if output.num_wrong else {}
            rows.append({"asked_bytes": row["size_bytes"]} | row | wrong)
    return rows


def _common(num_ranks: int) -> dict[str, Any]:
    return {"framework": NAME, "backend": "NCCL, nccl-tests", "num_ranks": num_ranks, "dtype": "float32"}


def _row(line: Line, name: str, num_ranks: int) -> dict[str, Any]:
    # The bandwidths that it prints are rounded to 0.01 GB/s, so that small sizes have none.
    algbw, busbw = rates(name, line.num_bytes, line.time_us * 1e-6, num_ranks)
    return {
        "size_bytes": line.num_bytes,
        "dtype": _DTYPES.get(line.dtype, line.dtype),
        "in_a_row_us": line.time_us,
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": busbw,
        "check": f"{WRONG}{line.num_wrong} values" if line.num_wrong else "ok",
    }
