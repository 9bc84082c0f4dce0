"""FLOPs of matrix products and convolutions, whether instructions or calls of a library.

    matrix product    2 x elements of the result x length of the contracted dims
    convolution       2 x features in x (output position, window position) pairs that meet an element, not padding

TPU programs print a matrix product as a convolution: batch dims become dims of the window, padded or dilated so that
only the pairs of one batch meet. Counted as above, both forms give the same number.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

from .hlo import Array, Computation, Instruction, arrays_of

MATMUL_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul")
CONVOLUTION_CALLS = ("__cudnn$conv",)


class MatmulKind(NamedTuple):
    """What decides how fast a device multiplies matrices."""

    dtype: str  # of the factors, as HLO spells it
    precision: str  # "default", "high" or "highest"


def matmul_kind(instruction: Instruction, computation: Computation) -> MatmulKind:
    """Reads the kind of a product, by its first factor."""
    printed = instruction.attribute("operand_precision")
    if found := re.search(r'"operand_precision":\[([^\]]*)\]', instruction.attributes):
        printed = found.group(1).lower()
    precision = "highest" if "highest" in printed else "high" if "high" in printed else "default"
    return MatmulKind(_operand(instruction, 0, computation).dtype, precision)


def dot_flops(dot: Instruction, computation: Computation) -> float:
    """FLOPs of a ``dot``."""
    left = _operand(dot, 0, computation)
    return _matmul_flops(dot, left, dot.integers("lhs_contracting_dims"))


def matmul_call_flops(call: Instruction, computation: Computation) -> float:
    """FLOPs of a call of a library's matrix product; the contracted dim is the last of the left factor unless told."""
    left = _operand(call, 0, computation)
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.attributes)
    dims = tuple(map(int, re.findall(r"\d+", found.group(1)))) if found else (len(left.dims) - 1,)
    return _matmul_flops(call, left, dims)


def convolution_flops(convolution: Instruction, computation: Computation) -> float:
    """FLOPs of a ``convolution``, or of a call of a library's: forward, or the gradient of its images or kernels.

    The window and dims of a gradient's call are printed as those of the forward convolution.

    Raises:
        ValueError: If it does not print its dims.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", convolution.attribute("dim_labels"))
    if not labels:
        raise ValueError(f"convolution {convolution.name} must print its dim_labels")
    of_images, of_kernels, of_output = labels.groups()
    images, kernels, output = (
        _operand(convolution, 0, computation),
        _operand(convolution, 1, computation),
        _result(convolution),
    )
    if "BackwardInput" in convolution.attribute("custom_call_target"):
        images, output = output, images
    elif "BackwardFilter" in convolution.attribute("custom_call_target"):
        kernels, output = output, kernels
    window = convolution.attribute("window")
    pairs = 1
    for place in range(len(of_output) - 2):
        size_in, size_window, size_out = (
            array.dims[labels.index(str(place))]
            for array, labels in ((images, of_images), (kernels, of_kernels), (output, of_output))
        )
        pairs *= _window_pairs(window, place, size_in, size_out, size_window)
    features_in = kernels.dims[of_kernels.index("i")]  # of one group, however many there are
    outside = output.dims[of_output.index("b")] * output.dims[of_output.index("f")]
    return 2.0 * outside * features_in * pairs


def _matmul_flops(product: Instruction, left: Array, contracted: tuple[int, ...]) -> float:
    return 2.0 * _result(product).num_elements * math.prod(left.dims[dim] for dim in contracted)


def _operand(instruction: Instruction, position: int, computation: Computation) -> Array:
    return arrays_of(computation[instruction.operands[position]].shape)[0]


def _result(instruction: Instruction) -> Array:
    return instruction.arrays[0]  # calls of a library give their workspace as well


@functools.lru_cache(maxsize=4096)
def _window_pairs(window: str, place: int, size_in: int, size_out: int, size_window: int) -> int:
    """Counts the pairs of an output position and a window position that meet an element of the input."""

    def field_of(name: str, default: str) -> str:
        found = re.search(rf"(?:^|\s){name}=(\S+)", window)
        return found.group(1).split("x")[place] if found else default

    stride, base, dilation = (int(field_of(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(field_of("pad", "0_0").split("_")[0])
    # Position o and window position k meet at o * stride + k * dilation - low, an element if that is a multiple of
    # base inside of the input: o is then the same modulo base / gcd(stride, base).
    common = math.gcd(stride, base)
    period = base // common
    pairs = 0
    for offset in range(size_window):
        shift = offset * dilation - low
        if shift % common:
            continue
        first = max(0, -(shift // stride))
        last = min(size_out - 1, ((size_in - 1) * base - shift) // stride)
        residue = -(shift // common) * pow(stride // common, -1, period) % period
        first += (residue - first) % period
        pairs += max(0, (last - first) // period + 1)
    return pairs
