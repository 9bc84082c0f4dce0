"""What a compiled step holds beside its arguments, at each point of its schedule.

A scheduled program says in which order its operations run and who reads what: so it tells how long each array is
needed, which is what the compiler itself goes by when it lays out memory.

    bitcast, tuple, get-tuple-element   names for arrays that are there
    done                                what its start made
    while                               carries its state in place
    fusion, all-reduce, update          take the place of an operand that ends there and is as large
    all else                            makes arrays

Arrays that the program returns are not counted: they lie in donated arguments, or in memory of their own. How arrays
are placed is not known here; gaps between them are why a compiler's temporaries are more than what is alive at the peak
(seen: 0 to 6 %). In a loop, what takes the place of the state that it carries counts twice. TPU programs keep arrays on
the chip and in tiles, and reserve more than all of them. What an array is for is read from where it is made:

    activations   results of the forward
    gradients     results of the backward, of activations and of parameters alike: the program does not tell them apart
    buckets       what collectives send and receive: packed gradients and their sums, gathered parameters
    updates       results of the optimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..scopes import SYNC_SCOPE
from .hlo import Computation, Instruction, Module, arrays_of, parse_module, parts_of, root_of
from .operations import Operation, OperationReader
from .schedule import Schedule

KINDS = ("activations", "gradients", "buckets", "updates")
_KIND_OF_PHASE = {"forward": "activations", "backward": "gradients", "optimizer": "updates"}
_NAMES = frozenset("bitcast tuple get-tuple-element opt-barrier optimization-barrier add-dependency domain".split())
_IN_PLACE = frozenset("fusion all-reduce all-reduce-start dynamic-update-slice scatter".split())
_NOT_THEIRS = frozenset(("parameter", "constant"))


class Buffer(NamedTuple):
    """An array.

    Attributes:
        name: Of the operation that makes it.
        num_bytes: Its size.
        kind: One of ``KINDS``.
        first: Position in the schedule where it is made.
        last: Position of the last operation that needs it.
    """

    name: str
    num_bytes: int
    kind: str
    first: int
    last: int


@dataclass(frozen=True)
class Liveness:
    """What is alive when.

    Attributes:
        buffers: All that are neither arguments nor results; of what a loop or a call makes inside, what it holds at
            most at a time.
        num_positions: Length of the schedule.
        backward_end: Position after the last arithmetic of the backward; 0 if there is none.
    """

    buffers: tuple[Buffer, ...]
    num_positions: int
    backward_end: int = 0

    def alive(self, position: int) -> dict[str, int]:
        """Gives the bytes of each kind at a position of the schedule."""
        found = dict.fromkeys(KINDS, 0)
        for buffer in self.buffers:
            if buffer.first <= position <= buffer.last:
                found[buffer.kind] += buffer.num_bytes
        return found

    def peak(self, start: int = 0, stop: int | None = None) -> dict[str, int]:
        """Gives the bytes of each kind where they are most together, from one position to before another."""
        change = [0] * (self.num_positions + 1)
        for buffer in self.buffers:
            change[buffer.first] += buffer.num_bytes
            change[buffer.last + 1] -= buffer.num_bytes
        totals, total = [], 0
        for step in change[: self.num_positions]:
            total += step
            totals.append(total)
        chosen = range(*slice(start, stop).indices(self.num_positions))
        return self.alive(max(chosen, key=totals.__getitem__)) if chosen else dict.fromkeys(KINDS, 0)


def read_liveness(compiled: Any) -> Liveness:
    """Reads what a compiled program holds when.

    Args:
        compiled: A ``jax.stages.Compiled``, a ``TargetProgram``, or the text of one.

    Returns:
        Its arrays.

    Raises:
        ValueError: If the text is not of a scheduled HLO module, or is cut off.
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
    """The arrays of one computation, by number."""

    def __init__(self, computation: Computation, kinds: Sequence[str]) -> None:
        self._computation = computation
        self._made: list[Buffer] = []
        self._made_by: dict[str, list[int]] = {}
        self._of: dict[str, list[int | None]] = {}  # each array of an instruction's result; None is not counted
        for place, (instruction, kind) in enumerate(zip(computation.values(), kinds, strict=True)):
            self._of[instruction.name] = self._result(instruction, kind, place)
            if instruction.opcode not in _NAMES:
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
        if opcode in _NOT_THEIRS:
            return [None] * len(arrays)
        if opcode == "get-tuple-element":
            index = instruction.integers("index")[0]
            parts = [len(arrays_of(part)) for part in parts_of(self._computation[instruction.operands[0]].shape)]
            return given[sum(parts[:index]) : sum(parts[: index + 1])]
        if opcode in _NAMES or opcode == "while":
            return given
        if opcode.endswith(("-done", "-update")):
            self._made_by[instruction.name] = made = self._made_by[instruction.operands[0]]
            return given if opcode.endswith("-update") else list(made[: len(arrays)])
        # What is started gives (operands, results, ...); a copy (result, operand, ...); an all-reduce results alone.
        gives_operands = opcode.endswith("-start") and len(arrays) > len(given)
        first = 1 if opcode == "copy-start" else 0
        new = [*arrays[:first], *arrays[first + len(given) :]] if gives_operands else arrays
        made = list(range(len(self._made), len(self._made) + len(new)))
        self._made += [Buffer(instruction.name, array.num_bytes, kind, place, place) for array in new]
        self._made_by[instruction.name] = made
        return [*made[:first], *given, *made[first:]] if gives_operands else [*made]

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
    sends = operation.starts is not None and not operation.starts.is_metrics
    return "buckets" if sends or SYNC_SCOPE in operation.op_name else _KIND_OF_PHASE[operation.phase]
