"""FLOPs and bytes of the instructions of a compiled program.

    matrix product    2 x elements of the result x length of the contracted dims
    convolution       2 x features in x (output position, window position) pairs that meet an element, not padding
    reduction         elements of the input
    other arithmetic  elements of the result
    fusion            FLOPs of its instructions; bytes of its inputs and outputs, since intermediates stay on chip
    loop              body and condition, times the trip count
    asynchronous      counted at the start; collectives count nothing
    cuDNN attention   its products, by the shape of the scores
    other calls       bytes alone, with a note

Each array that an instruction reads or writes counts once, in full; a slice or gather counts what it reads, an in-place
update what it writes. Nothing is cached between instructions; arrays that a TPU program keeps on chip (memory space 1
of a tiled layout) do not count.

TPU programs print a matrix product as a convolution, whose batch dims are window dims, padded or dilated so that only
pairs of the same batch meet: both forms give the same number. They print no trip counts, as others do: these are
derived from a counter with constant start, step and end, as ``lax.scan`` and ``fori_loop`` make it.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .hlo import Array, Computation, HLOError, Instruction, Module, arrays_of, parts_of, root_of

_FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element after-all opt-barrier partition-id replica-id domain "
    "add-dependency".split()
)
_MOVEMENT = frozenset(
    "copy transpose reshape broadcast concatenate slice dynamic-slice dynamic-update-slice gather pad reverse "
    "bitcast-convert convert copy-start rng-bit-generator dynamic-reshape iota".split()
)
_ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan2 atanh cbrt ceil clamp compare complex cos cosh cosine count-leading-zeros "
    "divide erf exponential exponential-minus-one floor imag is-finite log log-plus-one logistic map maximum minimum "
    "multiply negate not or population-count power real reduce-precision remainder rng round-nearest-afz "
    "round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sinh sqrt "
    "stochastic-convert subtract tan tanh xor".split()
)
_WRITTEN_ONLY = frozenset(("broadcast", "rng-bit-generator", "iota"))
_PARTIAL_READS = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # index of the operand that is written
_COMMUNICATION = re.compile(r"all-reduce|reduce-scatter|all-gather|collective-|all-to-all|ragged-all|send|recv")
_UNCOUNTED = frozenset(("cholesky", "triangular-solve", "fft", "ragged-dot", "scaled-dot", "topk"))
_CALLS_WITHOUT_WORK = frozenset(
    "Sharding SPMDFullToShardShape SPMDShardToFullShape AllocateBuffer AssumeGatherIndicesInBound "
    "PrepareAsyncCallStart PrepareAsyncCallDone".split()
)
_ON_CHIP = re.compile(r"\w+\[[^\]]*\]\{[^}:]*:T[^}]*S\(1\)[^}]*\}")
_MATMUL_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul")
_CONVOLUTION_CALLS = ("__cudnn$conv",)
_ATTENTION_CALLS = ("__cudnn$fmha",)


class MatmulKind(NamedTuple):
    """What determines the speed of a matrix product."""

    dtype: str  # of the factors, in HLO's spelling
    precision: str  # "default", "high" or "highest"
    shape: tuple[int, ...] = ()  # batch, rows, columns, contracted; empty for convolutions and fused attention
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
        matmul = Counter(dict(self.matmul_flops))
        matmul.update(other.matmul_flops)
        return Work(
            dict(matmul), self.vector_flops + other.vector_flops, self.num_bytes + other.num_bytes,
            self.num_kernels + other.num_kernels,
        )  # fmt: skip

    def times(self, count: float) -> Work:
        """Returns the work of ``count`` repetitions."""
        matmul = {kind: flops * count for kind, flops in self.matmul_flops.items()}
        return Work(matmul, self.vector_flops * count, self.num_bytes * count, self.num_kernels * count)


class WorkCounter:
    """Counts the work of a module's instructions; ``notes`` says in words what could not be counted."""

    def __init__(self, module: Module) -> None:
        self.notes: list[str] = []
        self._module = module
        self._totals: dict[int, Work] = {}

    def of(self, instruction: Instruction, computation: Computation) -> Work:
        """Counts one instruction with everything that it contains; collectives count as no work."""
        instruction = _synchronous(instruction)
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")) or _COMMUNICATION.match(opcode):
            return Work()
        if opcode == "while":
            return self._loop(instruction)
        if opcode == "conditional":
            branches = [self.total(branch) for branch in self._module.called(instruction)]
            return max(branches, key=lambda work: (work.flops, work.num_bytes), default=Work())
        if opcode in ("call", "async"):
            return sum((self.total(inner) for inner in self._module.called(instruction)), Work())
        arithmetic = self.arithmetic(instruction, computation)
        return Work(arithmetic.matmul_flops, arithmetic.vector_flops, self._bytes(instruction, computation), 1.0)

    def total(self, computation: Computation) -> Work:
        """Counts a computation."""
        key = id(computation)
        if key not in self._totals:
            self._totals[key] = sum((self.of(inner, computation) for inner in computation.values()), Work())
        return self._totals[key]

    def _loop(self, loop: Instruction) -> Work:
        trips = trip_count(self._module, loop)
        if trips is None:
            self.note(f"loop {loop.name}: trip count unknown, counted once")
        once = sum((self.total(inner) for inner in self._module.called(loop)), Work())
        return once.times(1 if trips is None else trips)

    def arithmetic(self, instruction: Instruction, computation: Computation) -> Work:
        """Counts the FLOPs of one instruction, without its bytes."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode in _MOVEMENT:
            return Work()
        if opcode == "dot":
            return _matmul(instruction, computation)
        if opcode == "convolution":
            return Work({_matmul_kind(instruction, computation): _convolution_flops(instruction, computation)})
        if opcode == "custom-call":
            return self._custom_call(instruction, computation)
        if opcode == "fusion":
            return sum((self._used(called) for called in self._module.called(instruction)), Work())
        if opcode in _UNCOUNTED:
            self.note(f"{opcode} {instruction.name}: its FLOPs are not counted, only its bytes are")
            return Work()
        counted = instruction.arrays
        if opcode == "scatter":
            counted = computation[instruction.operands[-1]].arrays[:1]
        elif opcode in ("reduce", "reduce-window", "select-and-scatter", "sort"):
            counted = tuple(array for name in instruction.operands for array in computation[name].arrays)
        elif opcode not in _ELEMENTWISE and not opcode.endswith(("-start", "-done", "-update")):
            if not _COMMUNICATION.match(opcode):
                self.note(f"{opcode} {instruction.name}: an unknown operation, only its bytes are counted")
                return Work()
        return Work(vector_flops=float(max((array.num_elements for array in counted), default=0)))

    def _used(self, fused: Computation) -> Work:
        """FLOPs of a fused computation; only elements that are used are computed."""
        used = _used_shares(fused)
        works = (self.arithmetic(inner, fused).times(used[name]) for name, inner in fused.items())
        return sum(works, Work())

    def _custom_call(self, call: Instruction, computation: Computation) -> Work:
        target = call.attribute("custom_call_target").strip('"')
        if target.startswith(_MATMUL_CALLS):
            return _matmul(call, computation)
        if target.startswith(_ATTENTION_CALLS) and (flops := _attention_flops(call, computation)):
            return Work({_matmul_kind(call, computation)._replace(is_attention=True): flops})
        if target.startswith(_CONVOLUTION_CALLS):
            return Work({_matmul_kind(call, computation): _convolution_flops(call, computation)})
        if target not in _CALLS_WITHOUT_WORK:
            self.note(f"custom call {target}: its FLOPs are unknown, only its bytes are counted")
        return Work()

    def _bytes(self, instruction: Instruction, computation: Computation) -> float:
        opcode = instruction.opcode
        if opcode == "fusion":
            return self._fusion_bytes(instruction, computation)
        written = _memory_bytes(instruction.shape)
        if opcode in _WRITTEN_ONLY:
            return float(written)
        if opcode == "copy-start":  # returns the copy, the operand and a handle
            return float(sum(_memory_bytes(part) for part in parts_of(instruction.shape)[:2]))
        if opcode in _PARTIAL_READS:
            is_read = _memory_bytes(computation[instruction.operands[0]].shape) > 0
            return float(written + is_read * instruction.num_bytes)
        if opcode in _UPDATES:
            update = computation[instruction.operands[_UPDATES[opcode]]]
            return float(_memory_bytes(update.shape) + (update.num_bytes if written else 0))
        if opcode == "custom-call":
            target = instruction.attribute("custom_call_target").strip('"')
            if target.startswith(_MATMUL_CALLS + _CONVOLUTION_CALLS):
                written = _memory_bytes((*parts_of(instruction.shape), instruction.shape)[0])  # not the workspace
        read = sum(_memory_bytes(computation[name].shape) for name in set(instruction.operands))
        return float(read + written)

    def _fusion_bytes(self, fusion: Instruction, computation: Computation) -> float:
        called = next(self._module.called(fusion))
        used = _used_shares(called)
        parameters = {int(inner.literal): name for name, inner in called.items() if inner.opcode == "parameter"}
        total = float(_memory_bytes(fusion.shape))
        for result in _results(called):
            if _is_in_place(result, called) and _memory_bytes(result.shape):
                update = called[result.operands[_UPDATES[result.opcode]]]
                total += update.num_bytes - result.num_bytes
        shares: defaultdict[str, float] = defaultdict(float)
        for index, name in enumerate(fusion.operands):
            shares[name] += used[parameters[index]]
        return total + sum(min(1.0, share) * _memory_bytes(computation[name].shape) for name, share in shares.items())

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def _synchronous(instruction: Instruction) -> Instruction:
    """Replaces an asynchronous start by the instruction that it starts, except for communication and copies."""
    opcode = instruction.opcode
    if not opcode.endswith("-start") or opcode == "copy-start" or _COMMUNICATION.match(opcode):
        return instruction
    return instruction._replace(opcode=opcode.removesuffix("-start"), shape=parts_of(instruction.shape)[1])


@functools.lru_cache(maxsize=4096)
def _memory_bytes(shape: str) -> int:
    """Bytes of a shape's arrays in main memory."""
    return sum(array.num_bytes for array in arrays_of(_ON_CHIP.sub("", shape)))


def _used_shares(fused: Computation) -> dict[str, float]:
    """The share of its elements that each instruction of a fused computation must compute for the results.

    A slice needs as many elements as it returns, arithmetic the same share of its operands as of itself, and an operand
    that is only updated in place nothing.
    """
    sizes = {name: sum(array.num_elements for array in inner.arrays) for name, inner in fused.items()}
    needed = {name: float(size) if fused[name].is_root else 0.0 for name, size in sizes.items()}
    for name in reversed(fused):
        user = fused[name]
        share = needed[name] / sizes[name] if sizes[name] else 0.0
        for position, operand in enumerate(user.operands):
            if position == 0 and _is_in_place(user, fused):
                continue
            partial = user.opcode in _PARTIAL_READS and position == 0
            wanted = needed[name] if partial else share * sizes[operand]
            needed[operand] = min(float(sizes[operand]), needed[operand] + wanted)
    return {name: needed[name] / size if size else 0.0 for name, size in sizes.items()}


def _is_in_place(instruction: Instruction, fused: Computation) -> bool:
    """Whether an instruction of a fused computation updates part of a fusion operand."""
    if instruction.opcode not in _UPDATES:
        return False
    changed = fused[_origin(instruction.operands[0], fused, through=("bitcast",))]
    return changed.opcode == "parameter" or _is_in_place(changed, fused)


def _results(computation: Computation) -> list[Instruction]:
    """The results of a computation: the parts of its root if that is a tuple, seen through bitcasts."""
    root = root_of(computation)
    names = root.operands if root.opcode == "tuple" else (root.name,)
    return [computation[_origin(name, computation, through=("bitcast",))] for name in names]


def _matmul_kind(instruction: Instruction, computation: Computation) -> MatmulKind:
    """The kind of a product, from its first factor."""
    printed = instruction.attribute("operand_precision")
    if found := re.search(r'"operand_precision":\[([^\]]*)\]', instruction.attributes):
        printed = found.group(1).lower()
    precision = "highest" if "highest" in printed else "high" if "high" in printed else "default"
    return MatmulKind(_operand(instruction, 0, computation).dtype, precision)


def _matmul(product: Instruction, computation: Computation) -> Work:
    """A product; a library call contracts the last dim of the left factor unless it says otherwise."""
    left, num_results = _operand(product, 0, computation), _result(product).num_elements
    dims, batch_dims = product.integers("lhs_contracting_dims"), product.integers("lhs_batch_dims")
    if product.opcode != "dot":
        dims = _printed_dims("lhs_contracting_dimensions", product) or (len(left.dims) - 1,)
        batch_dims = _printed_dims("lhs_batch_dimensions", product)
    contracted, batch = (math.prod(left.dims[dim] for dim in each) for each in (dims, batch_dims))
    rows = left.num_elements // max(1, batch * contracted)
    shape = (batch, rows, num_results // max(1, batch * rows), contracted)
    kind = _matmul_kind(product, computation)._replace(shape=shape)
    return Work({kind: 2.0 * num_results * contracted})


def _printed_dims(name: str, call: Instruction) -> tuple[int, ...]:
    found = re.search(rf'"{name}":\[([^\]]*)\]', call.attributes)
    return tuple(map(int, re.findall(r"\d+", found.group(1)))) if found else ()


def _attention_flops(call: Instruction, computation: Computation) -> float:
    """FLOPs of cuDNN's attention: two products of the forward, five of the backward; half of each if it is causal."""
    # The scores' shape is printed: batch, heads, queries and keys.
    if len(scores := _printed_dims("dimensions", call)) != 4:
        return 0.0
    batch, heads, num_queries, num_keys = scores
    width = _operand(call, 0, computation).num_elements / (batch * heads * num_queries)
    products = 5 if "Backward" in call.attribute("custom_call_target") else 2
    visible = 0.5 if "CAUSAL" in call.attributes else 1.0
    return products * visible * 2.0 * batch * heads * num_queries * num_keys * width


def _convolution_flops(convolution: Instruction, computation: Computation) -> float:
    """FLOPs of a ``convolution``, or of a library call, whose gradients print the window of the forward convolution."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", convolution.attribute("dim_labels"))
    if not labels:
        raise HLOError(f"convolution {convolution.name} must print its dim_labels")
    of_images, of_kernels, of_output = labels.groups()
    images, kernels = (_operand(convolution, place, computation) for place in (0, 1))
    output = _result(convolution)
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
    features_in = kernels.dims[of_kernels.index("i")]  # per feature group
    outside = output.dims[of_output.index("b")] * output.dims[of_output.index("f")]
    return 2.0 * outside * features_in * pairs


def _operand(instruction: Instruction, position: int, computation: Computation) -> Array:
    return arrays_of(computation[instruction.operands[position]].shape)[0]


def _result(instruction: Instruction) -> Array:
    return instruction.arrays[0]  # library calls also return their workspace


@functools.lru_cache(maxsize=4096)
def _window_pairs(window: str, place: int, size_in: int, size_out: int, size_window: int) -> int:
    """Number of pairs of an output position and a window position that meet an element of the input."""

    def field_of(name: str, default: str) -> str:
        found = re.search(rf"(?:^|\s){name}=(\S+)", window)
        return found.group(1).split("x")[place] if found else default

    stride, base, dilation = (int(field_of(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(field_of("pad", "0_0").split("_")[0])
    # Output position o and window position k meet at o * stride + k * dilation - low. That is an input element if it is
    # a multiple of base within the input, so valid o are equal modulo base / gcd(stride, base).
    common = math.gcd(stride, base)
    period = base // common
    pairs = 0
    first_that_meets = max(0, -((size_out - 1) * stride - low) // dilation)
    for offset in range(first_that_meets, min(size_window, ((size_in - 1) * base + low) // dilation + 1)):
        shift = offset * dilation - low
        if shift % common:
            continue
        first = max(0, -(shift // stride))
        last = min(size_out - 1, ((size_in - 1) * base - shift) // stride)
        residue = -(shift // common) * pow(stride // common, -1, period) % period
        first += (residue - first) % period
        pairs += max(0, (last - first) // period + 1)
    return pairs


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Reads or derives how often a loop runs; None if the text does not determine it."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known.group(1))
    where = next(computation for computation in module.computations.values() if computation.get(loop.name) is loop)
    body, condition = (module.computations[loop.attribute(key).removeprefix("%")] for key in ("body", "condition"))
    before, after, compare = where[loop.operands[0]], root_of(body), root_of(condition)
    if compare.attribute("direction") != "LT" or before.opcode != "tuple" or after.opcode != "tuple":
        return None
    if (place := _place_in_state(compare.operands[0], condition)) is None:
        return None
    add = body[after.operands[place]]
    if add.opcode != "add" or _place_in_state(add.operands[0], body) != place:
        return None
    of = ((before.operands[place], where), (add.operands[1], body), (compare.operands[1], condition))
    first, step, end = (_constant(*each) for each in of)
    if first is None or step is None or end is None or step < 1:
        return None
    return max(0, -((first - end) // step))


def _place_in_state(name: str, computation: Computation) -> int | None:
    """Index of the loop state's part that an instruction reads; None if it reads none."""
    instruction = computation[_origin(name, computation)]
    if instruction.opcode != "get-tuple-element" or computation[instruction.operands[0]].opcode != "parameter":
        return None
    return instruction.integers("index")[0]


def _origin(name: str, computation: Computation, through: tuple[str, ...] = ("copy", "bitcast")) -> str:
    """The instruction of which this one is a copy, or a bitcast."""
    while computation[name].opcode in through:
        name = computation[name].operands[0]
    return name


def _constant(name: str, computation: Computation) -> int | None:
    name = _origin(name, computation)
    literal = computation[name].literal
    is_integer = computation[name].opcode == "constant" and re.fullmatch(r"-?\d+", literal)
    return int(literal) if is_integer else None
