"""Rows of NVIDIA's nccl-tests, where its programs are installed: what NCCL does without a framework.

    all_reduce_perf -b 1048576 -e 1048576 -g 8

prints a line per size, of which the first four of the last eight numbers are of calls out of place:

    # size  count  type  redop  root  time (us)  algbw (GB/s)  busbw (GB/s)  #wrong  time  algbw  busbw  #wrong
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..harness.run import FAILED
from .cases import size_of

NAME = "nccl-tests"
_PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_gather": "all_gather_perf",
    "broadcast": "broadcast_perf",
    "reduce": "reduce_perf",
    "send_recv": "sendrecv_perf",
}
_TIMEOUT_S = 300.0
_NUM_FIELDS = 13


def installed(names: Sequence[str]) -> dict[str, str]:
    """Finds the programs of collectives, by the collective."""
    found = {name: shutil.which(_PROGRAMS[name]) for name in names if name in _PROGRAMS}
    return {name: path for name, path in found.items() if path}


def rows(programs: Mapping[str, str], sizes: Sequence[int], num_gpus: int) -> Iterator[dict[str, Any]]:
    """Runs the programs on GPUs of this host, and makes a row of each collective and size.

    Args:
        programs: By collective, as ``installed`` gives them.
        sizes: Bytes of the full buffer.
        num_gpus: On which one process runs them.
    """
    common = {"framework": NAME, "backend": "NCCL, nccl-tests", "kind": "gpus", "num_ranks": num_gpus}
    for name, program in programs.items():
        for asked in sizes:
            row = common | {"collective": name, "asked_bytes": asked, "dtype": "float32"}
            num_bytes = str(size_of(name, asked, num_gpus))
            command = [program, "-b", num_bytes, "-e", num_bytes, "-g", str(num_gpus), "-d", "float", "-n", "20"]
            try:
                said = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
                yield row | read(said)
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                yield row | {"check": f"{FAILED}{error}"}


def read(output: str) -> dict[str, Any]:
    """Reads the line of the one size that a program was asked for.

    Raises:
        ValueError: If there is no such line.

    Example:
        >>> read("  1048576  262144  float  sum  -1  29.97  34.99  61.23  0  29.89  35.08  61.39  0")["busbw_gb_per_s"]
        61.23
    """
    lines = [line.split() for line in output.splitlines() if line.strip() and not line.startswith("#")]
    of_sizes = [fields for fields in lines if len(fields) == _NUM_FIELDS and fields[0].isdigit()]
    if len(of_sizes) != 1:
        raise ValueError(f"nccl-tests printed {len(of_sizes)} lines of sizes, not 1: {output[-200:]!r}")
    num_bytes, *_, time_us, algbw, busbw, wrong = of_sizes[0][:9]
    check = "ok" if wrong in ("0", "N/A") else f"WRONG: {wrong} values"
    return {
        "size_bytes": int(num_bytes),
        "in_a_row_us": float(time_us),
        "algbw_gb_per_s": float(algbw),
        "busbw_gb_per_s": float(busbw),
        "check": check,
    }
