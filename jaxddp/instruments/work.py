"""FLOPs and bytes of the instructions of a compiled program.

    matrix product    2 x elements of the result x length of the contracted dims
    convolution       2 x features in x (output position, window position) pairs that meet an element, not padding
    reduction         elements of the input
    other arithmetic  elements of the result
    fusion            FLOPs of its instructions; bytes of its inputs and outputs, since intermediates stay on chip
    loop              body and condition, times the trip count
    asynchronous      counted at the start; collectives count nothing
    library calls     as products, convolutions and attention; others bytes alone, with a note

An array counts once, in full; a slice or gather counts what it reads, an in-place update what it writes; what a TPU
keeps on chip does not count. TPU programs print a product as a convolution, whose batch dims are window dims, padded or
dilated so that only pairs of one batch meet.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .hlo import Computation, Instruction, arrays_of, parts_of, root_of

_FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element after-all opt-barrier partition-id replica-id domain "
    "add-dependency".split()
)
_WITHOUT_FLOPS = frozenset(  # what moves data, and custom calls
    "copy transpose reshape broadcast concatenate slice dynamic-slice dynamic-update-slice gather pad reverse "
    "bitcast-convert convert copy-start rng-bit-generator dynamic-reshape iota Sharding SPMDFullToShardShape "
    "SPMDShardToFullShape AllocateBuffer AssumeGatherIndicesInBound PrepareAsyncCallStart PrepareAsyncCallDone".split()
)
_ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan2 atanh cbrt ceil clamp compare complex cos cosh cosine count-leading-zeros "
    "divide erf exponential exponential-minus-one floor imag is-finite log log-plus-one logistic map maximum minimum "
    "multiply negate not or population-count power real reduce-precision remainder rng round-nearest-afz "
    "round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sinh sqrt "
    "stochastic-convert subtract tan tanh xor".split()
)
_PARTIAL_READS = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # index of the operand that is written
_COMMUNICATION = re.compile(r"all-reduce|reduce-scatter|all-gather|collective-|all-to-all|ragged-all|send|recv")
_ON_CHIP = re.compile(r"\w+\[[^\]]*\]\{[^}:]*:T[^}]*S\(1\)[^}]*\}")  # memory space 1 of a tiled layout
_PRODUCTS = ("dot", "__cublas$gemm", "__cublas$lt$matmul")  # operations, and library calls by the start of their names
_CONVOLUTIONS = ("convolution", "__cudnn$conv")


class MatmulKind(NamedTuple):
    """What determines the speed of a matrix product."""

    dtype: str  # of the factors, in HLO's spelling
    precision: str  # "default", "high" or "highest"
    shape: tuple[int, ...] = ()  # batch, rows, columns, contracted; empty for convolutions
    is_attention: bool = False


@dataclass(frozen=True)
class Work:
    """What an instruction costs."""

    # FLOPs of matrix products and convolutions, by kind
    matmul_flops: Mapping[MatmulKind, float] = field(default_factory=dict)
    vector_flops: float = 0.0  # all other FLOPs
    num_bytes: float = 0.0  # bytes read and written
    num_kernels: float = field(default=0.0, compare=False)  # kernels launched

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return sum(self.matmul_flops.values()) + self.vector_flops

    def __add__(self, other: Work) -> Work:
        ours, theirs = self.matmul_flops, other.matmul_flops
        matmul = {kind: ours.get(kind, 0) + theirs.get(kind, 0) for kind in {**ours, **theirs}}
        vector_flops, num_bytes = self.vector_flops + other.vector_flops, self.num_bytes + other.num_bytes
        return Work(matmul, vector_flops, num_bytes, self.num_kernels + other.num_kernels)

    def times(self, count: float) -> Work:
        """The work of ``count`` repetitions."""
        matmul = {kind: flops * count for kind, flops in self.matmul_flops.items()}
        return Work(matmul, self.vector_flops * count, self.num_bytes * count, self.num_kernels * count)


def work_of(instruction: Instruction) -> Work:
    """Counts an instruction with everything that it contains; collectives count as no work."""
    opcode = instruction.opcode
    if opcode.endswith("-start") and opcode != "copy-start" and not _COMMUNICATION.match(opcode):
        opcode = opcode.removesuffix("-start")  # counts as what it starts
        instruction = replace(instruction, opcode=opcode, shape=parts_of(instruction.shape)[1])
    if opcode in _FREE or opcode.endswith(("-done", "-update")) or _COMMUNICATION.match(opcode):
        return Work()
    if opcode in ("conditional", "while", "call", "async"):
        called = [sum(map(work_of, computation.values()), Work()) for computation in instruction.called]
        if opcode == "conditional":
            return max(called, key=lambda work: (work.flops, work.num_bytes), default=Work())
        return sum(called, Work()).times(trips(instruction))
    return replace(arithmetic(instruction), num_bytes=_bytes(instruction), num_kernels=1.0)


def trips(caller: Instruction) -> int:
    """How often what an instruction calls runs; 1 for a loop that does not tell, which is noted."""
    if caller.opcode != "while":
        return 1
    if (known := trip_count(caller)) is None:
        caller.module.notes.append(f"loop {caller.name}: trip count unknown, counted once")
    return 1 if known is None else known


def arithmetic(instruction: Instruction) -> Work:
    """Counts the FLOPs of an instruction, without its bytes."""
    opcode = instruction.opcode
    called = _called_name(instruction)
    if called in _FREE or called in _WITHOUT_FLOPS:
        return Work()
    if called.startswith(_PRODUCTS):
        return _matmul(instruction)
    if called.startswith(_CONVOLUTIONS):
        return _convolution(instruction)
    if called.startswith("__cudnn$fmha") and len(scores := instruction.integers("dimensions")) == 4:
        return _attention(instruction, scores)
    if opcode == "fusion":  # only elements that are used are computed
        return sum(
            (arithmetic(fused[name]).times(share)
             for fused in instruction.called for name, share in _used_shares(fused).items()), Work()
        )  # fmt: skip
    if opcode == "scatter":
        counted = instruction.inputs[-1].arrays[:1]
    elif opcode in ("reduce", "reduce-window", "select-and-scatter", "sort"):
        counted = tuple(array for operand in instruction.inputs for array in operand.arrays)
    elif opcode in _ELEMENTWISE or opcode.endswith(("-start", "-done", "-update")) or _COMMUNICATION.match(opcode):
        counted = instruction.arrays
    else:
        instruction.module.notes.append(f"{called}: its FLOPs are unknown, only its bytes are counted")
        return Work()
    return Work(vector_flops=float(max((array.num_elements for array in counted), default=0)))


def _bytes(instruction: Instruction) -> float:
    opcode = instruction.opcode
    if opcode == "fusion":
        return _fusion_bytes(instruction)
    written = _memory_bytes(instruction.shape)
    if opcode in ("broadcast", "rng-bit-generator", "iota"):
        return float(written)
    if opcode == "copy-start":  # returns the copy, the operand and a handle
        return float(sum(_memory_bytes(part) for part in parts_of(instruction.shape)[:2]))
    if opcode in _PARTIAL_READS:
        is_read = _memory_bytes(instruction.inputs[0].shape) > 0
        return float(written + is_read * instruction.num_bytes)
    if opcode in _UPDATES:
        update = instruction.inputs[_UPDATES[opcode]]
        return float(_memory_bytes(update.shape) + (update.num_bytes if written else 0))
    if opcode == "custom-call" and _called_name(instruction).startswith(_PRODUCTS + _CONVOLUTIONS):
        written = _memory_bytes((*parts_of(instruction.shape), instruction.shape)[0])  # not the workspace
    read = {operand.name: _memory_bytes(operand.shape) for operand in instruction.inputs}
    return float(sum(read.values()) + written)


def _fusion_bytes(fusion: Instruction) -> float:
    called = fusion.called[0]
    used = _used_shares(called)
    parameters = {int(inner.literal): name for name, inner in called.items() if inner.opcode == "parameter"}
    total = float(_memory_bytes(fusion.shape))
    root = root_of(called)
    for each in root.inputs if root.opcode == "tuple" else [root]:
        result = _origin(each, ("bitcast",))
        if _is_in_place(result) and _memory_bytes(result.shape):
            total += result.inputs[_UPDATES[result.opcode]].num_bytes - result.num_bytes
    shares: defaultdict[str, float] = defaultdict(float)
    for index, name in enumerate(fusion.operands):
        shares[name] += used[parameters[index]]
    read = (min(1.0, share) * _memory_bytes(fusion.computation[name].shape) for name, share in shares.items())
    return total + sum(read)


@functools.lru_cache(maxsize=4096)
def _memory_bytes(shape: str) -> int:
    """Bytes of a shape's arrays in main memory."""
    return sum(array.num_bytes for array in arrays_of(_ON_CHIP.sub("", shape)))


def _used_shares(fused: Computation) -> dict[str, float]:
    """The share of its elements that each instruction of a fused computation must compute for the results."""
    # A slice needs as many elements as it returns, arithmetic the same share of its operands as of itself, and an
    # operand that is only updated in place nothing.
    sizes = {name: sum(array.num_elements for array in inner.arrays) for name, inner in fused.items()}
    needed = {name: float(size) if fused[name].is_root else 0.0 for name, size in sizes.items()}
    for name in reversed(fused):
        user = fused[name]
        share = needed[name] / sizes[name] if sizes[name] else 0.0
        for position, operand in enumerate(user.operands):
            if position == 0 and _is_in_place(user):
                continue
            partial = user.opcode in _PARTIAL_READS and position == 0
            wanted = needed[name] if partial else share * sizes[operand]
            needed[operand] = min(float(sizes[operand]), needed[operand] + wanted)
    return {name: needed[name] / size if size else 0.0 for name, size in sizes.items()}


def _is_in_place(instruction: Instruction) -> bool:
    """Whether an instruction of a fused computation updates part of a fusion operand."""
    if instruction.opcode not in _UPDATES:
        return False
    changed = _origin(instruction.inputs[0], ("bitcast",))
    return changed.opcode == "parameter" or _is_in_place(changed)


def _matmul_kind(instruction: Instruction) -> MatmulKind:
    """The kind of a product, from its first factor."""
    found = re.search("highest|high", instruction.attribute("operand_precision").lower())
    return MatmulKind(instruction.inputs[0].arrays[0].dtype, found[0] if found else "default")


def _called_name(instruction: Instruction) -> str:
    """The name of a library call, or of an operation."""
    is_call = instruction.opcode == "custom-call"
    return instruction.attribute("custom_call_target") if is_call else instruction.opcode


def _matmul(product: Instruction) -> Work:
    left, num_results = product.inputs[0].arrays[0], product.arrays[0].num_elements
    name = "dims" if product.opcode == "dot" else "dimensions"
    batch, contracted = (
        math.prod(left.dims[dim] for dim in product.integers(f"lhs_{which}_{name}"))
        for which in ("batch", "contracting")
    )
    rows = left.num_elements // max(1, batch * contracted)
    shape = (batch, rows, num_results // max(1, batch * rows), contracted)
    return Work({_matmul_kind(product)._replace(shape=shape): 2.0 * num_results * contracted})


def _attention(call: Instruction, scores: Sequence[int]) -> Work:
    """CuDNN's attention: two products of the forward, five of the backward; half of each if it is causal."""
    batch, heads, num_queries, _ = scores
    width = call.inputs[0].arrays[0].num_elements / (batch * heads * num_queries)
    products = 5 if "Backward" in call.attribute("custom_call_target") else 2
    visible = 0.5 if "CAUSAL" in call.attributes else 1.0
    return Work({_matmul_kind(call)._replace(is_attention=True): products * visible * 2.0 * math.prod(scores) * width})


def _convolution(convolution: Instruction) -> Work:
    """A ``convolution``, or a library call, whose gradients print the window of the forward convolution."""
    of_images, of_kernels, of_output = re.split("_|->", convolution.attribute("dim_labels"))
    images, kernels = (one.arrays[0] for one in convolution.inputs[:2])
    output = convolution.arrays[0]  # library calls also return their workspace
    target = convolution.attribute("custom_call_target")
    if "BackwardInput" in target:
        images, output = output, images
    elif "BackwardFilter" in target:
        kernels, output = output, kernels
    window = convolution.attribute("window")
    pairs = 1
    for place in range(len(of_output) - 2):
        size_in, size_window, size_out = (
            array.dims[labels.index(str(place))]
            for array, labels in ((images, of_images), (kernels, of_kernels), (output, of_output))
        )
        pairs *= _window_pairs(window, place, size_in, size_out, size_window)
    features_in = kernels.dims[of_kernels.index("i")]  # per feature group
    outside = output.dims[of_output.index("b")] * output.dims[of_output.index("f")]
    return Work({_matmul_kind(convolution): 2.0 * outside * features_in * pairs})


@functools.lru_cache(maxsize=4096)
def _window_pairs(window: str, place: int, size_in: int, size_out: int, size_window: int) -> int:
    """Number of pairs of an output position and a window position that meet an element of the input."""
    fields = {name: sizes.split("x")[place] for name, sizes in (part.split("=") for part in window.split())}
    stride, base, dilation = (int(fields.get(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(fields.get("pad", "0_0").split("_")[0])
    outputs, pairs = np.arange(size_out) * stride - low, 0
    for offset in range(size_window):
        meets = outputs + offset * dilation  # places in the dilated input, of which every ``base``-th has an element
        pairs += int(np.count_nonzero((meets >= 0) & (meets <= (size_in - 1) * base) & (meets % base == 0)))
    return pairs


def trip_count(loop: Instruction) -> int | None:
    """How often a loop runs, as printed or by a counter as of ``lax.scan``; None if the text does not determine it."""
    if known := loop.integers("known_trip_count"):
        return known[0]
    of_loop = (loop.attribute(key).removeprefix("%") for key in ("body", "condition"))
    body, condition = (root_of(loop.module.computations[name]) for name in of_loop)
    before = loop.inputs[0]
    if condition.attribute("direction") != "LT" or before.opcode != "tuple" or body.opcode != "tuple":
        return None
    if (place := _place_in_state(condition.inputs[0])) is None:
        return None
    add = body.inputs[place]
    if add.opcode != "add" or _place_in_state(add.inputs[0]) != place:
        return None
    first, step, end = map(_constant, (before.inputs[place], add.inputs[1], condition.inputs[1]))
    if first is None or step is None or end is None or step < 1:
        return None
    return max(0, -((first - end) // step))


def _place_in_state(instruction: Instruction) -> int | None:
    """Index of the loop state's part that an instruction reads; None if it reads none."""
    origin = _origin(instruction)
    is_read = origin.opcode == "get-tuple-element" and origin.inputs[0].opcode == "parameter"
    return origin.integers("index")[0] if is_read else None


def _constant(instruction: Instruction) -> int | None:
    origin = _origin(instruction)
    return int(origin.literal) if origin.opcode == "constant" and re.fullmatch(r"-?\d+", origin.literal) else None


def _origin(instruction: Instruction, through: tuple[str, ...] = ("copy", "bitcast")) -> Instruction:
    """The instruction of which this one is a copy, or a bitcast."""
    while instruction.opcode in through:
        instruction = instruction.inputs[0]
    return instruction
