"""FLOPs and bytes of the instructions of a compiled program.

    matrix product    as ``products.py`` says; convolutions too
    reduction         elements of what is reduced
    other arithmetic  elements of the result
    fusion            its instructions' FLOPs; bytes of what enters and leaves it, since what is inside stays on chip
    loop              its body's and condition's, times the trip count
    asynchronous      that of what is started, at its start; collectives have none

Bytes count each array that an instruction reads or writes once, in full, except where only a part is touched: what a
slice or gather reads, what an update in place writes. They are those of main memory under a cache that holds nothing
between instructions; what a TPU program keeps on the chip (memory space 1 of a tiled layout) is not in it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from .hlo import Computation, Instruction, Module, arrays_of, parts_of, root_of
from .loops import trip_count
from .products import CONVOLUTION_CALLS, MATMUL_CALLS, convolution_flops, dot_flops, matmul_call_flops, matmul_kind
from .products import MatmulKind as MatmulKind

_FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element after-all opt-barrier partition-id replica-id domain "
    "add-dependency".split()
)
_MOVEMENT = frozenset(
    "copy transpose reshape broadcast concatenate slice dynamic-slice dynamic-update-slice gather pad reverse "
    "bitcast-convert convert copy-start rng-bit-generator dynamic-reshape iota".split()
)
_WRITTEN_ONLY = frozenset(("broadcast", "rng-bit-generator", "iota"))
_PARTIAL_READS = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # which operand says what is written
_COMMUNICATION = re.compile(r"all-reduce|reduce-scatter|all-gather|collective-|all-to-all|ragged-all|send|recv")
_UNCOUNTED = frozenset(("cholesky", "triangular-solve", "fft", "ragged-dot", "scaled-dot", "topk"))
_CALLS_WITHOUT_WORK = frozenset(
    "Sharding SPMDFullToShardShape SPMDShardToFullShape AllocateBuffer AssumeGatherIndicesInBound".split()
)
_ON_CHIP = re.compile(r"\w+\[[^\]]*\]\{[^}:]*:T[^}]*S\(1\)[^}]*\}")


@dataclass(frozen=True)
class Work:
    """What an instruction costs.

    Attributes:
        matmul_flops: FLOPs of matrix products and convolutions, by kind.
        vector_flops: FLOPs of everything else.
        num_bytes: Bytes read and written.
    """

    matmul_flops: Mapping[MatmulKind, float] = field(default_factory=dict)
    vector_flops: float = 0.0
    num_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return sum(self.matmul_flops.values()) + self.vector_flops

    def __add__(self, other: Work) -> Work:
        """Adds work done one after the other."""
        matmul = Counter(dict(self.matmul_flops))
        matmul.update(other.matmul_flops)
        return Work(dict(matmul), self.vector_flops + other.vector_flops, self.num_bytes + other.num_bytes)

    def times(self, count: float) -> Work:
        """Gives the same work ``count`` times over."""
        matmul = {kind: flops * count for kind, flops in self.matmul_flops.items()}
        return Work(matmul, self.vector_flops * count, self.num_bytes * count)


class WorkCounter:
    """Counts the work of a module's instructions.

    Attributes:
        notes: What could not be counted, in words.
    """

    def __init__(self, module: Module) -> None:
        """Counts nothing yet."""
        self.notes: list[str] = []
        self._module = module
        self._totals: dict[int, Work] = {}

    def of(self, instruction: Instruction, computation: Computation) -> Work:
        """Gives the work of one instruction, with all that it contains.

        Args:
            instruction: The instruction.
            computation: Where it and its operands stand.

        Returns:
            Its work; that of collectives is zero, since they are not the device's own.
        """
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
        return Work(arithmetic.matmul_flops, arithmetic.vector_flops, self._bytes(instruction, computation))

    def total(self, computation: Computation) -> Work:
        """Adds up the work of a computation."""
        key = id(computation)
        if key not in self._totals:
            self._totals[key] = sum((self.of(inner, computation) for inner in computation.values()), Work())
        return self._totals[key]

    def trip_count(self, loop: Instruction) -> int | None:
        """Says how often a loop runs; None if the text does not tell."""
        return trip_count(self._module, loop)

    def _loop(self, loop: Instruction) -> Work:
        trips = self.trip_count(loop)
        if trips is None:
            self._note(f"loop {loop.name}: trip count unknown, counted once")
        once = sum((self.total(inner) for inner in self._module.called(loop)), Work())
        return once.times(1 if trips is None else trips)

    def arithmetic(self, instruction: Instruction, computation: Computation) -> Work:
        """Gives the FLOPs of one instruction, without its bytes."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode in _MOVEMENT:
            return Work()
        if opcode == "dot":
            return Work({matmul_kind(instruction, computation): dot_flops(instruction, computation)})
        if opcode == "convolution":
            return Work({matmul_kind(instruction, computation): convolution_flops(instruction, computation)})
        if opcode == "custom-call":
            return self._custom_call(instruction, computation)
        if opcode == "fusion":
            return sum((self._used(called) for called in self._module.called(instruction)), Work())
        if opcode in _UNCOUNTED:
            self._note(f"{opcode} {instruction.name}: its FLOPs are not counted, only its bytes are")
            return Work()
        if opcode == "scatter":
            return Work(vector_flops=float(computation[instruction.operands[-1]].arrays[0].num_elements))
        if opcode in ("reduce", "reduce-window", "select-and-scatter", "sort"):
            sizes = [array.num_elements for name in instruction.operands for array in computation[name].arrays]
            return Work(vector_flops=float(max(sizes)))
        return Work(vector_flops=float(max((array.num_elements for array in instruction.arrays), default=0)))

    def _used(self, fused: Computation) -> Work:
        """FLOPs of a fused computation: an instruction computes only those elements that are used."""
        used = _used_shares(fused)
        works = (self.arithmetic(inner, fused).times(used[name]) for name, inner in fused.items())
        return sum(works, Work())

    def _custom_call(self, call: Instruction, computation: Computation) -> Work:
        target = call.attribute("custom_call_target").strip('"')
        if target.startswith(MATMUL_CALLS):
            return Work({matmul_kind(call, computation): matmul_call_flops(call, computation)})
        if target.startswith(CONVOLUTION_CALLS):
            return Work({matmul_kind(call, computation): convolution_flops(call, computation)})
        if target not in _CALLS_WITHOUT_WORK:
            self._note(f"custom call {target}: its FLOPs are unknown, only its bytes are counted")
        return Work()

    def _bytes(self, instruction: Instruction, computation: Computation) -> float:
        opcode = instruction.opcode
        if opcode == "fusion":
            return self._fusion_bytes(instruction, computation)
        written = _memory_bytes(instruction.shape)
        if opcode in _WRITTEN_ONLY:
            return float(written)
        if opcode == "copy-start":  # gives the copy, what is copied and a handle
            return float(sum(_memory_bytes(part) for part in parts_of(instruction.shape)[:2]))
        if opcode in _PARTIAL_READS:
            is_read = _memory_bytes(computation[instruction.operands[0]].shape) > 0
            return float(written + is_read * instruction.num_bytes)
        if opcode in _UPDATES:
            update = computation[instruction.operands[_UPDATES[opcode]]]
            return float(_memory_bytes(update.shape) + (update.num_bytes if written else 0))
        if opcode == "custom-call":
            target = instruction.attribute("custom_call_target").strip('"')
            if target.startswith(MATMUL_CALLS + CONVOLUTION_CALLS):
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

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _synchronous(instruction: Instruction) -> Instruction:
    """Gives what an asynchronous start does, as if it were done at once; communication and copies stay as they are."""
    opcode = instruction.opcode
    if not opcode.endswith("-start") or opcode == "copy-start" or _COMMUNICATION.match(opcode):
        return instruction
    return instruction._replace(opcode=opcode.removesuffix("-start"), shape=parts_of(instruction.shape)[1])


@functools.lru_cache(maxsize=4096)
def _memory_bytes(shape: str) -> int:
    """Bytes of the arrays of a shape that are in main memory."""
    return sum(array.num_bytes for array in arrays_of(_ON_CHIP.sub("", shape)))


def _used_shares(fused: Computation) -> dict[str, float]:
    """Which share of its elements each instruction of a fused computation has to give for the results.

    A slice needs what it returns, arithmetic the same share of its operands as is needed of itself. An operand that is
    updated in place and otherwise unread needs nothing.
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
    """Whether an instruction of a fused computation changes a part of what the fusion is given."""
    if instruction.opcode not in _UPDATES:
        return False
    changed = fused[_through_bitcasts(instruction.operands[0], fused)]
    return changed.opcode == "parameter" or _is_in_place(changed, fused)


def _results(computation: Computation) -> list[Instruction]:
    """What a computation returns: the parts of its root if that is a tuple, seen through bitcasts."""
    root = root_of(computation)
    names = root.operands if root.opcode == "tuple" else (root.name,)
    return [computation[_through_bitcasts(name, computation)] for name in names]


def _through_bitcasts(name: str, computation: Computation) -> str:
    while computation[name].opcode == "bitcast":
        name = computation[name].operands[0]
    return name
