"""Rates that devices reach, as measured, beside the published peaks of ``chips.py``.

    matrix products   by dtype and shape from XLA's table of H100 and B200; without a table the best rate measured over
                      several shapes, times the share of the multiprocessors that its tiles keep busy; else the peak
    memory            92 % of the peak: STREAM's triad gives 3.09 of an H100's 3.35 TB/s
    kernels           1 us each, XLA's own estimate of a launch
    fused attention   the share of the peak that FlashAttention-2 reaches: 0.63 in A100's backward, 0.35 on later ones

OpenXLA, xla/service/gpu/model/default_matmul_perf_table.txtpb and gpu_performance_model_base.h. stas00/ml-engineering,
compute/accelerator/README.md. blackwell-tensorcore-kernels, results/bench.csv, cublasSgemm. NVIDIA, Matrix
Multiplication Background, DU-09799-001. Dao, FlashAttention-2, 2023.
"""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .chips import Chip

Shape = tuple[float, float, float, float]  # batch, rows, columns, contracted
_FILE = Path(__file__).with_name("measured_products.json")
_SAME_DIE = {"h200": "h100", "gb200": "b200", "gb300": "b200"}
_COLUMNS = {"tf32": 4, "bfloat16": 5, "float16": 5}
_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
_MULTIPROCESSORS = {"a100": 108, "h100": 132, "h200": 132, "b200": 148, "gb200": 148, "gb300": 160}
_MEMORY_SHARE = 0.92
_ATTENTION_SHARES = {"a100": 0.63}
_KERNEL_S = 1e-6


def as_measured(chip: Chip) -> Chip:
    """Gives a chip the rates that measurements reach; one of which nothing was measured keeps its peaks."""
    if chip.is_measured or chip.name not in _measurements()["best"]:
        return chip
    rate = _MEMORY_SHARE * chip.memory_bytes_per_s
    return replace(chip, is_measured=True, memory_bytes_per_s=rate, kernel_s=_KERNEL_S)


def product_rate(chip: Chip, dtype: str, shape: Shape | tuple[()] = ()) -> float:
    """FLOP/s of a matrix product; ``shape`` is its batch, rows, columns and contracted length, empty if unknown."""
    # A dtype without a published peak counts as the slowest published one.
    peak = chip.flops_per_s.get(dtype, min(chip.flops_per_s.values()))
    if not chip.is_measured:
        return peak
    name, best = _SAME_DIE.get(chip.name, chip.name), _measurements()["best"][chip.name]
    if shape and dtype in _COLUMNS and name in _measurements()["tflops"]:
        return 1e12 * _by_shape(name, _COLUMNS[dtype], shape)
    if (dtype := "bfloat16" if dtype == "float16" else dtype) not in best:
        return peak
    return 1e12 * best[dtype] * (_busy(_MULTIPROCESSORS[chip.name], shape) if shape else 1.0)


def attention_rate(chip: Chip, dtype: str) -> float:
    """FLOP/s of fused attention."""
    share = _ATTENTION_SHARES.get(chip.name, 0.35) if chip.is_measured else 1.0
    return share * chip.flops_per_s.get(dtype, min(chip.flops_per_s.values()))


def rates_in_words(chip: Chip) -> str:
    """Says which rates a chip has."""
    if not chip.is_measured:
        return "rates, assumed: published peaks of products and memory"
    has_table = _SAME_DIE.get(chip.name, chip.name) in _measurements()["tflops"]
    products = f"in {', '.join(_COLUMNS)} by shape, others" if has_table else "by tiles,"
    return (
        f"rates, measured: products {products} at the best of several shapes or, assumed, at peak, memory at"
        f" {_MEMORY_SHARE:.0%} of its peak, {_KERNEL_S * 1e6:g} us a kernel"
    )


def _busy(multiprocessors: int, shape: Shape) -> float:
    """The share of full waves of tiles that is the result, with the tiles of which it is largest."""
    batch, rows, columns, _ = shape

    def share(height: int, width: int) -> float:
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        return batch * rows * columns / (math.ceil(tiles / multiprocessors) * multiprocessors * height * width)

    return max(share(*tile) for tile in _TILES)


@functools.cache
def _measurements() -> Any:
    return json.loads(_FILE.read_text())


@functools.cache
def _table(name: str, column: int) -> tuple[Any, list[Any]]:
    """Logarithms of the rates of all batches x rows x columns x contracted, and of these sizes."""
    rows = sorted(_measurements()["tflops"][name])
    sizes = [sorted(set(values)) for values in zip(*(row[:4] for row in rows), strict=True)]
    return np.log([row[column] for row in rows]).reshape([*map(len, sizes)]), [np.log(known) for known in sizes]


def _by_shape(name: str, column: int, shape: Shape) -> float:
    """Interpolates in the logarithms of all sizes; beyond the table the nearest sizes' rate."""
    table, sizes = _table(name, column)
    more = max(1.0, shape[0] / math.exp(sizes[0][-1]))  # a larger batch counts as more rows
    at = np.log(np.maximum([shape[0] / more, shape[1] * more, *shape[2:]], 1.0))
    weights = [[np.interp(one, known, row) for row in np.eye(len(known))] for one, known in zip(at, sizes, strict=True)]
    return math.exp(np.einsum("brck,b,r,c,k", table, *weights))
