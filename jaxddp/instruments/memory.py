"""Memory of each device by component: of a training state, by layout and formula, and of a compiled step.

    after init         parameters, optimizer state and scalars: the state, which lives across steps
    before the update  the state, the batch, and the peak of temporaries until the backward ends
    after the step     the state, the batch, and the peak of temporaries after that

There are three sources. The **layout** of a state gives the bytes of every leaf on a device, and the **formula**
(``planning/cost/memory.py``) must match it to the byte. The **compiled step** takes the state as arguments, with the
same bytes; its temporaries follow from the schedule (``read_liveness``). The **allocator** of a device reports what is
in use, for whatever purpose.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.

Which arrays are alive at each point of a compiled step's schedule, apart from its arguments.

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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import optax

from ..layout import Leaf
from ..planning.cost.memory import FP32, Accumulate, PerParameter, StateBytes, exact_state_bytes
from ..scopes import SYNC_SCOPE
from ..strategy import Layout, Ranks, Strategy
from ..training.step import TrainState
from ..tree import named_leaves
from .hlo import Computation, Instruction, Module, arrays_of, one_line_errors, parse_module, parts_of, root_of
from .schedule import Operation, OperationReader, Schedule


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes on one device.

    Attributes:
        parameters: Parameters as the loss takes them: this device's shards, or copies in a compute dtype.
        optimizer_state: Optimizer state, with its counters, the masters of such copies, and a moving average.
        others: Step number, RNG key, and model state.
        batch: This device's examples.
        padding: What the compiler's layout adds to arguments, such as a TPU's tiles.
        activations: Results of the forward.
        gradients: Results of the backward.
        buckets: Inputs and outputs of collectives, gathered parameters included.
        updates: Results of the optimizer that are not written in place.
    """

    parameters: int = 0
    optimizer_state: int = 0
    others: int = 0
    batch: int = 0
    padding: int = 0
    activations: int = 0
    gradients: int = 0
    buckets: int = 0
    updates: int = 0

    @property
    def state(self) -> int:
        """Bytes that live across steps."""
        return self.parameters + self.optimizer_state + self.others

    @property
    def temporary(self) -> int:
        """Bytes that live within a step."""
        return self.activations + self.gradients + self.buckets + self.updates

    @property
    def total(self) -> int:
        """All bytes."""
        return self.state + self.batch + self.padding + self.temporary


@dataclass(frozen=True)
class StepMemory:
    """A compiled step at three moments.

    Attributes:
        after_init: The state alone.
        before_update: The peak of forward and backward.
        after_step: The peak of the update that follows.
        temporaries: As the compiler laid them out, with fragmentation: slightly more than the peaks need.
    """

    after_init: DeviceBytes
    before_update: DeviceBytes
    after_step: DeviceBytes
    temporaries: int


class Allocated(NamedTuple):
    """What a device's allocator has handed out."""

    in_use_bytes: int
    peak_bytes: int


def held_bytes(layout: Layout) -> DeviceBytes:
    """Returns the bytes of parameters and optimizer state on a device.

    The other components are 0.

    Example:
        >>> import jax.numpy as jnp, jaxddp, optax
        >>> trainer = jaxddp.Trainer(lambda params, batch: 0.0, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh(4))
        >>> state = trainer.abstract_state({"w": jnp.zeros((2, 5))})
        >>> held_bytes(trainer.layout(state))  # 10 floats in full; 3 of 12 of each moment, and a counter
        DeviceBytes(parameters=40, optimizer_state=28, others=0, ...
    """
    params, opt_state = (
        sum(leaf.bytes_on_rank for leaf in jax.tree.leaves(tree)) for tree in (layout.params, layout.opt_state)
    )
    return DeviceBytes(parameters=params, optimizer_state=opt_state)


def padding_share(layout: Layout) -> float:
    """Returns the padding of all sharded leaves as a share of their size; 0 if nothing is sharded.

    Where whole parameters have owners, it is by how much the fullest rank exceeds the average.
    """
    cut = [leaf for leaf in jax.tree.leaves((layout.params, layout.opt_state)) if leaf.cut is not None]
    whole = sum(leaf.dtype.itemsize * _num_elements(leaf) for leaf in cut)
    if layout.owners is not None:
        owned = [leaf for leaf in jax.tree.leaves(layout.opt_state) if leaf.cut is not None]
        whole += sum(layout.owners.state_bytes) - sum(leaf.dtype.itemsize * _num_elements(leaf) for leaf in owned)
    held = sum(leaf.bytes_on_rank * leaf.cut.num_ranks for leaf in cut)
    return held / whole - 1 if whole else 0.0


def state_formula(params: Any, strategy: Strategy, num_ranks: int, per_parameter: PerParameter = FP32) -> StateBytes:
    """Computes by formula what a device holds of the state, and of gradients that outlive their bucket.

    Optimizer scalars such as a step count are not included.

    ``params`` are full arrays or ``jax.ShapeDtypeStruct``, all trainable; the strategy says what is sharded, and how
    (``cut``).

    Raises:
        ValueError: If whole parameters have owners.
    """
    layout = _layout(params, strategy, num_ranks)
    if layout.owners is not None:
        raise ValueError(f"strategy (={strategy.name}) must shard elements: held_bytes counts the state of others")
    return _formula(layout, strategy, per_parameter)


def _layout(params: Any, strategy: Strategy, num_ranks: int) -> Layout:
    leaves = jax.tree.map(lambda leaf: Leaf(tuple(leaf.shape), leaf.dtype), params)
    return strategy.layout(leaves, optax.identity(), Ranks("data", num_ranks, num_ranks))


def _formula(layout: Layout, strategy: Strategy, per_parameter: PerParameter) -> StateBytes:
    sizes = {name: _num_elements(leaf) for name, leaf in named_leaves(layout.params).items()}
    pieces = [size for name, size in sizes.items() if name in layout.cuts]
    whole = [size for name, size in sizes.items() if name not in layout.cuts] if layout.cuts else []
    each = strategy.plan(()).each_microbatch
    stage = 3 if layout.held else 1 + each if layout.cuts else 0
    accumulate: Accumulate = "shards" if layout.held or each else "full"
    if not layout.cuts:
        pieces = list(sizes.values())
    return exact_state_bytes(pieces, stage, layout.ranks.num_ranks, per_parameter, accumulate, whole_elements=whole)


def step_memory(compiled: Any, state: TrainState) -> StepMemory:
    """Reads the memory of a compiled step on each device.

    ``compiled`` is from ``Trainer.compile``, for devices or for a target, and ``state`` what it was compiled for.

    Raises:
        ValueError: If the program takes fewer arguments than the state has leaves.
    """
    stats, liveness = compiled.memory_analysis(), read_liveness(compiled)
    arguments = _arguments(compiled, state, stats.argument_size_in_bytes)
    return StepMemory(
        after_init=replace(arguments, batch=0),
        before_update=replace(arguments, **liveness.peak(0, liveness.backward_end)),
        after_step=replace(arguments, **liveness.peak(liveness.backward_end)),
        temporaries=stats.temp_size_in_bytes,
    )


def allocated_bytes(device: jax.Device) -> Allocated | None:
    """Returns a device's bytes in use and their peak since the process started; None on CPUs, which do not count."""
    stats = device.memory_stats()
    return Allocated(stats["bytes_in_use"], stats["peak_bytes_in_use"]) if stats else None


def _arguments(compiled: Any, state: TrainState, laid_out: int) -> DeviceBytes:
    """Bytes of a program's arguments: the leaves of the state in tree order, then those of the batch."""
    module = parse_module(compiled)
    entry = module.computations[module.entry].values()
    parameters = sorted((int(one.literal), one.num_bytes) for one in entry if one.opcode == "parameter")
    sizes = [num_bytes for _, num_bytes in parameters]
    # JAX drops arguments that are not read: parts of a batch, or an injected hyperparameter that a schedule sets.
    leaves = [(_component(name), leaf) for name, leaf in named_leaves(state).items()]
    held = {"parameters": 0, "optimizer_state": 0, "others": 0}
    given = list(sizes)
    for name, leaf in leaves:
        full = leaf.size * leaf.dtype.itemsize
        if given and (given[0] == full or (given[0] and full and full % given[0] == 0)):  # all of it, or a shard
            held[name] += given.pop(0)
        elif full == 0 or (name == "optimizer_state" and leaf.ndim == 0):
            held[name] += full
        else:
            raise ValueError(
                f"the program takes {len(sizes)} arguments and the state has {len(leaves)} leaves: it must be a step of"
                " that state"
            )
    return DeviceBytes(**held, batch=sum(given), padding=laid_out - sum(sizes))


def _component(name: str) -> str:
    """What a leaf of a state counts as, by its name."""
    return {"params": "parameters", "opt_state": "optimizer_state"}.get(name.partition(".")[0], "others")


def _num_elements(leaf: Leaf) -> int:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype).size


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
        returns_operands = (opcode.endswith("-start") or opcode == "send") and len(arrays) > len(given)
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
