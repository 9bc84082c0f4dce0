"""Which arrays are alive at each point of a compiled step's schedule, apart from its arguments.

A scheduled program gives the order of its operations and the users of each array, so it gives the lifetime of each
array, which is what the compiler lays out memory by.

    bitcast, tuple, get-tuple-element   aliases of existing arrays
    done                                aliases of what its start made
    while                               updates its state in place
    fusion, all-reduce, update          may reuse the memory of an operand of the same size that ends there
    everything else                     makes new arrays

Results of the program are not counted: they reuse donated arguments or have their own memory. Placement is unknown, so
fragmentation makes a compiler's temporaries larger than the peak found here (seen: 0 to 6 %). In a loop, arrays that
replace the loop state count twice. TPU programs keep arrays on chip and in tiles, and reserve more than the sum. The
kind of an array follows from the operation that makes it:

    activations   results of the forward
    gradients     results of the backward, of activations and parameters alike: the program does not distinguish them
    buckets       inputs and outputs of collectives: packed gradients and their sums, gathered parameters
    updates       results of the optimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..scopes import SYNC_SCOPE
from .hlo import Computation, Instruction, Module, arrays_of, one_line_errors, parse_module, parts_of, root_of
from .schedule import Operation, OperationReader, Schedule

BUFFER_KINDS = ("activations", "gradients", "buckets", "updates")
_KIND_OF_PHASE = {"forward": "activations", "backward": "gradients", "optimizer": "updates"}
_ALIASES = frozenset("bitcast tuple get-tuple-element opt-barrier optimization-barrier add-dependency domain".split())
_IN_PLACE = frozenset("fusion all-reduce all-reduce-start dynamic-update-slice scatter".split())
_NOT_COUNTED = frozenset(("parameter", "constant"))


class Buffer(NamedTuple):
    """An array.

    Attributes:
        name: The operation that makes it.
        kind: One of ``BUFFER_KINDS``.
        first: Position in the schedule where it is made.
        last: Position of the last operation that reads it.
    """

    name: str
    num_bytes: int
    kind: str
    first: int
    last: int


@dataclass(frozen=True)
class Liveness:
    """The lifetimes of all arrays.

    Attributes:
        buffers: All arrays that are neither arguments nor results; for a loop or call, its internal peak.
        num_positions: Length of the schedule.
        backward_end: Position after the backward's last arithmetic; 0 without a backward.
    """

    buffers: tuple[Buffer, ...]
    num_positions: int
    backward_end: int = 0

    def alive(self, position: int) -> dict[str, int]:
        """Bytes alive at a position, by kind."""
        found = dict.fromkeys(BUFFER_KINDS, 0)
        for buffer in self.buffers:
            if buffer.first <= position <= buffer.last:
                found[buffer.kind] += buffer.num_bytes
        return found

    def peak(self, start: int = 0, stop: int | None = None) -> dict[str, int]:
        """Bytes by kind at the peak of positions ``start`` to ``stop - 1``."""
        change = [0] * (self.num_positions + 1)
        for buffer in self.buffers:
            change[buffer.first] += buffer.num_bytes
            change[buffer.last + 1] -= buffer.num_bytes
        totals, total = [], 0
        for step in change[: self.num_positions]:
            total += step
            totals.append(total)
        chosen = range(*slice(start, stop).indices(self.num_positions))
        return self.alive(max(chosen, key=totals.__getitem__)) if chosen else dict.fromkeys(BUFFER_KINDS, 0)


@one_line_errors
def read_liveness(compiled: Any) -> Liveness:
    """Reads the lifetimes of a compiled program's arrays.

    ``compiled`` is a ``jax.stages.Compiled``, a ``TargetProgram``, or the text of one.

    Raises:
        HLOError: A ValueError, if the text is not a scheduled HLO module, or is damaged.
    """
    module = parse_module(compiled)
    return _Reader(module).read(module.computations[module.entry])


class _Reader:
    """Follows arrays through the computations of a module."""

    def __init__(self, module: Module) -> None:
        self._module, self._operations = module, OperationReader(module)

    def read(self, computation: Computation) -> Liveness:
        operations = self._operations.read(computation)
        arrays = _Arrays(computation, [_kind(operation) for operation in operations])
        inside = [
            Buffer(name, num_bytes, kind, place, place)
            for place, (name, instruction) in enumerate(computation.items())
            if instruction.opcode in ("while", "call", "conditional")
            for kind, num_bytes in self._most_inside(instruction).items()
        ]
        return Liveness((*arrays.buffers(), *inside), len(operations), Schedule(operations).backward_end())

    def _most_inside(self, instruction: Instruction) -> dict[str, int]:
        peaks = (self.read(called).peak() for called in self._module.called(instruction))
        return max(peaks, key=lambda kinds: sum(kinds.values()), default={})


class _Arrays:
    """The arrays of one computation, by index."""

    def __init__(self, computation: Computation, kinds: Sequence[str]) -> None:
        self._computation = computation
        self._made: list[Buffer] = []
        self._made_by: dict[str, list[int]] = {}
        self._of: dict[str, list[int | None]] = {}  # arrays of each instruction's result; None: not counted
        for place, (instruction, kind) in enumerate(zip(computation.values(), kinds, strict=True)):
            self._of[instruction.name] = self._result(instruction, kind, place)
            if instruction.opcode not in _ALIASES:
                self._use(instruction, place)
        self._results = set(self._of[root_of(computation).name])
        for place, instruction in enumerate(computation.values()):
            if instruction.opcode in _IN_PLACE:
                self._reuse(instruction, place)

    def buffers(self) -> list[Buffer]:
        return [buffer for number, buffer in enumerate(self._made) if number not in self._results]

    def _result(self, instruction: Instruction, kind: str, place: int) -> list[int | None]:
        opcode, arrays = instruction.opcode, arrays_of(instruction.shape)
        given = self._given(instruction)
        if opcode in _NOT_COUNTED:
            return [None] * len(arrays)
        if opcode == "get-tuple-element":
            index = instruction.integers("index")[0]
            parts = [len(arrays_of(part)) for part in parts_of(self._computation[instruction.operands[0]].shape)]
            return given[sum(parts[:index]) : sum(parts[: index + 1])]
        if opcode in _ALIASES or opcode == "while":
            return given
        if opcode.endswith(("-done", "-update")):
            self._made_by[instruction.name] = made = self._made_by[instruction.operands[0]]
            return given if opcode.endswith("-update") else list(made[: len(arrays)])
        # A start returns (operands, results, ...), of a copy (result, operand, ...), of an all-reduce only results.
        returns_operands = opcode.endswith("-start") and len(arrays) > len(given)
        first = 1 if opcode == "copy-start" else 0
        new = [*arrays[:first], *arrays[first + len(given) :]] if returns_operands else arrays
        made = list(range(len(self._made), len(self._made) + len(new)))
        self._made += [Buffer(instruction.name, array.num_bytes, kind, place, place) for array in new]
        self._made_by[instruction.name] = made
        return [*made[:first], *given, *made[first:]] if returns_operands else [*made]

    def _given(self, instruction: Instruction) -> list[int | None]:
        return [number for name in instruction.operands for number in self._of[name]]

    def _use(self, instruction: Instruction, place: int) -> None:
        for number in self._given(instruction):
            if number is not None:
                self._made[number] = self._made[number]._replace(last=place)

    def _reuse(self, instruction: Instruction, place: int) -> None:
        free = {number for number in self._given(instruction) if number is not None} - self._results
        for made in self._made_by[instruction.name]:
            size = self._made[made].num_bytes
            ending = (n for n in free if self._made[n].last == place and self._made[n].num_bytes == size)
            if made not in self._results and (taken := next(ending, None)) is not None:
                free.remove(taken)
                self._made[taken] = self._made[taken]._replace(last=place - 1)


def _kind(operation: Operation) -> str:
    sends = operation.starts is not None and operation.starts.is_gradients
    return "buckets" if sends or SYNC_SCOPE in operation.op_name else _KIND_OF_PHASE[operation.phase]
