"""Rows of what NVIDIA's nccl-tests printed: what NCCL does without a framework."""

from __future__ import annotations

from typing import Any

from jaxddp.network.nccl_tests import read_file as read_outputs

from .benchmark import WRONG
from .collective_cases import rates

NAME = "nccl-tests"
_DTYPES = {"float": "float32", "half": "float16", "double": "float64"}


def read_file(path: str) -> list[dict[str, Any]]:
    """Reads what programs printed: a row for each size, with bandwidths by the formulas of this benchmark.

    Raises:
        ValueError: If it is not such output, whole from its first line on.
        OSError: If it cannot be read.
    """
    rows = []
    for output in read_outputs(path):
        num_ranks = len(output.gpus)
        for line in output.lines:
            # The bandwidths that it prints are rounded to 0.01 GB/s, so that small sizes have none.
            algbw, busbw = rates(output.collective, line.num_bytes, line.time_us * 1e-6, num_ranks)
            num_wrong = output.num_wrong or line.num_wrong
            rows.append({
                "framework": NAME, "backend": "NCCL, nccl-tests", "device": next(iter(output.gpus.values())) or "GPU",
                "num_ranks": num_ranks, "collective": output.collective, "asked_bytes": line.num_bytes,
                "size_bytes": line.num_bytes, "dtype": _DTYPES.get(line.dtype, line.dtype),
                "in_a_row_us": line.time_us, "algbw_gb_per_s": algbw, "busbw_gb_per_s": busbw,
                "check": f"{WRONG}{num_wrong} values" if num_wrong else "ok",
            })  # fmt: skip
    return rows
