"""Reads a compiled step: its collectives, their position in the schedule, and the compute between them.

A collective is issued by a start and waited for by a done, or both at once if it is synchronous. Phases:

    optimizer  under the optimizer's scope, or depends on the backward without feeding a gradient reduction
    backward   arithmetic that JAX marks ``transpose(``, and packing, which feeds a gradient reduction
    forward    everything else
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..network import HLO_KINDS, Network
from ..scopes import LOSS_SCOPE, METRICS_SCOPE, MODEL_STATE_SCOPE, OPTIMIZER_SCOPE, OTHER_AXES_SCOPE, SYNC_SCOPE
from .hlo import Computation, Instruction, parse_module
from .work import Work, arithmetic, trips, work_of

REDUCTIONS = ("all-reduce", "reduce-scatter")
_RANGE = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # [4,2]T(1,0)


@dataclass(unsafe_hash=True)
class Collective:
    """One collective."""

    kind: str  # one of HLO_KINDS
    num_bytes: int  # bytes of the full buffer on the wire: the input of a reduce-scatter, the output of an all-gather
    group: tuple[int, ...] = ()  # devices of the first group that takes part; of a permutation, all of them
    is_async: bool = False  # whether it has a start and a done, and is not marked synchronous
    op_name: str = ""
    pairs: tuple[tuple[int, int], ...] = ()  # who sends to whom in a permutation; empty for others
    dtype: str = ""  # of the buffer, in HLO's spelling; of several the first
    source: str = ""  # file:line of the code that asked for it; empty if not printed

    def __post_init__(self) -> None:
        self.is_metrics = METRICS_SCOPE in self.op_name  # reduces the loss and metrics instead of gradients
        self.is_model_state = MODEL_STATE_SCOPE in self.op_name  # one by which ranks agree on the model's state
        # The strategy's, not of metrics, model state, the loss function or axes that are not of ranks. One of a single
        # device sends nothing; XLA leaves it where check_vma asks for it.
        others = (METRICS_SCOPE, MODEL_STATE_SCOPE, LOSS_SCOPE, OPTIMIZER_SCOPE, OTHER_AXES_SCOPE)
        is_named = SYNC_SCOPE in self.op_name or not any(scope in self.op_name for scope in others)
        self.is_gradients = is_named and len(self.group) != 1

    def seconds(self, network: Network) -> float:
        """Seconds of it, with the network to itself; a permutation takes as long as its slowest pair."""
        groups = [pair for pair in self.pairs if pair[0] != pair[1]] if self.pairs else [self.group]
        return max((network.seconds(self.kind, self.num_bytes, group) for group in groups), default=0.0)


@dataclass
class Operation:
    """One instruction of a schedule."""

    name: str
    phase: str = "forward"  # or "backward" or "optimizer"
    work: Work = field(default_factory=Work)  # its cost on the device; nothing for collectives
    starts: Collective | None = None  # the collective that it issues, if any
    waits_for: str = ""  # operation whose collective it waits for: its own if that is synchronous; empty if none
    body: tuple[Operation, ...] = ()  # operations of a loop or call, or of a conditional's branches that communicate
    trips: int = 1  # number of iterations of the body
    is_loop: bool = False  # whether the body is a loop's
    is_conditional: bool = False  # whether the body may not run
    op_name: str = ""
    operands: tuple[str, ...] = ()
    meanwhile: tuple[Operation, ...] = field(default=(), compare=False, repr=False)  # from its start to its done

    def __post_init__(self) -> None:  # its work plus that of its body, over all trips
        self.total_work: Work = self.work + sum((inner.total_work for inner in self.body), Work()).times(self.trips)
        self.communicates: bool = self.starts is not None or any(inner.communicates for inner in self.body)


@dataclass(frozen=True)
class Overlap:
    """How a step's gradient collectives overlap its backward, in bytes."""

    bytes_in_flight: int  # of those with backward arithmetic between start and done
    bytes_started_after_backward: int  # of those that start after the backward's last arithmetic
    num_bytes: int  # of all


@dataclass(frozen=True)
class Schedule:
    """A compiled step."""

    operations: tuple[Operation, ...]  # in the order in which they are issued
    num_devices: int = 1  # devices that it was compiled for
    notes: tuple[str, ...] = ()  # what could not be read, in words
    memory: Any = None  # of one device, as Compiled.memory_analysis() gives it; None if only the text was given

    def collectives(self) -> list[Collective]:
        """All collectives in schedule order; each of a loop as often as it iterates."""
        return [one.starts for one, _, times in walk(self.operations) if one.starts for _ in range(times)]

    def gradient_collectives(self) -> list[tuple[str, int]]:
        """Sorted ``(kind, bytes)`` of the strategy's collectives: ``Collective.is_gradients``."""
        return [(kind, num_bytes) for kind, num_bytes, _ in self.gradient_groups()]

    def gradient_groups(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """The same, with the devices of the first group."""
        return sorted((c.kind, c.num_bytes, c.group) for c in self.collectives() if c.is_gradients)

    def work(self) -> Work:
        """Everything that one device computes."""
        return sum((operation.total_work for operation in self.operations), Work())

    def overlap(self) -> Overlap:
        """Measures how the gradient collectives overlap the backward."""

        def computes(op: Operation) -> bool:
            return op.phase == "backward" and op.total_work.flops > 0

        end = max((place for place, op in enumerate(self.operations) if computes(op)), default=-1)
        late = in_flight = total = 0
        for place, op in enumerate(self.operations):
            num_bytes = sum(size for _, size in Schedule((op,)).gradient_collectives())
            total += num_bytes
            late += num_bytes if place > end else 0
            in_flight += num_bytes if any(map(computes, op.meanwhile)) else 0
        return Overlap(in_flight, late, total)


def read_schedule(compiled: Any) -> Schedule:
    """Reads a ``jax.stages.Compiled``, a ``TargetProgram``, or the text of one; a ValueError if it is no schedule."""
    is_text = isinstance(compiled, str)
    try:
        module = parse_module(compiled if is_text else compiled.as_text())
        operations = _read(module.entry)
    except (AttributeError, LookupError, ArithmeticError, RuntimeError, StopIteration, ValueError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"the HLO module cannot be read: {kind}{' '.join(str(error).split())[:160]}") from error
    memory = None if is_text else compiled.memory_analysis()
    return Schedule(operations, module.num_devices, tuple(dict.fromkeys(module.notes)), memory)


def gradient_collectives(compiled: Any) -> list[tuple[str, int]]:
    """Lists ``(kind, bytes)`` of a step's collectives, without those of loss and metrics, sorted."""
    return read_schedule(compiled).gradient_collectives()


def _read(computation: Computation, before: str = "forward") -> tuple[Operation, ...]:
    """The operations of a computation in schedule order; ``before`` is the phase of what says none."""
    collectives = {name: found for name, inner in computation.items() if (found := _collective(inner))}
    phases = _phases(computation, collectives, before)
    operations = tuple(_operation(inner, phases[name], collectives) for name, inner in computation.items())
    done = {one.waits_for: place for place, one in enumerate(operations) if one.waits_for}
    for place, one in enumerate(operations):
        one.meanwhile = operations[place + 1 : done.get(one.name, place)]
    return operations


def _operation(instruction: Instruction, phase: str, collectives: dict[str, Collective]) -> Operation:
    name, opcode = instruction.name, instruction.opcode
    make = partial(Operation, name, phase, op_name=instruction.op_name, operands=instruction.operands)
    if called := _read_inside(instruction):
        is_conditional = opcode == "conditional"
        body = sum((_read(one, phase if is_conditional else "forward") for one in called), ())
        return make(body=body, trips=trips(instruction), is_loop=opcode == "while", is_conditional=is_conditional)
    if opcode.endswith("-done"):
        start = instruction
        while start.operands and start.opcode.endswith(("-done", "-update")):
            start = start.inputs[0]
        if start.name in collectives:
            return make(waits_for=start.name)
    is_waited_for = name in collectives and not opcode.endswith("-start")
    work, starts = work_of(instruction), collectives.get(name)
    return make(work=work, starts=starts, waits_for=name if is_waited_for else "")


def _read_inside(instruction: Instruction) -> list[Computation]:
    """What an instruction calls that has operations of its own: of a conditional, the branches that communicate."""
    if instruction.opcode == "conditional":
        return [one for one in instruction.called if any(_kind(each) for op in one.values() for each in op.within())]
    return instruction.called if instruction.opcode in ("while", "call") else []


def _collective(instruction: Instruction) -> Collective | None:
    """The collective that an instruction issues: itself, or the first one inside what it calls."""
    if _read_inside(instruction) or instruction.opcode.endswith(("-done", "-update")):
        return None
    if instruction.opcode in ("send", "recv"):
        instruction.module.notes.append(f"{instruction.opcode} {instruction.name}: what it transfers is not counted")
        return None
    found = [inner for inner in instruction.within() if _kind(inner)]
    if not found:
        return None
    if len(found) > 1 and not _kind(instruction):
        named = f"{instruction.opcode} {instruction.name}"
        instruction.module.notes.append(f"{named}: holds {len(found)} collectives, only the first is counted")
    inner = found[0]
    kind, sizes = _kind(inner), [one.num_bytes for one in inner.inputs]
    if kind == "ragged-all-to-all":
        sizes = sizes[:1]  # the other operands are its output, offsets and sizes
    elif kind == "all-gather":
        sizes = [array.num_bytes for array in inner.arrays]
        if inner.opcode.endswith("-start"):  # returns (inputs, outputs)
            sizes = sizes[len(sizes) // 2 :]

    def readers(one: Instruction) -> list[Instruction]:
        return [each for each in one.computation.values() if one.name in each.operands]

    # What XLA for TPUs sends a round later comes from one without a name: those that read it have one.
    origins = [inner, *(_named(instruction, lambda one: one.inputs) or _named(instruction, readers))]
    return Collective(
        kind, sum(sizes), _group(inner),
        is_async=instruction.opcode.endswith("-start") and instruction.attribute("is_sync") != "true",
        op_name=next((one.op_name for one in origins if one.op_name), ""),
        pairs=_pairs(inner),
        dtype=inner.arrays[0].dtype if inner.arrays else "",
        source=next(filter(None, (one.source for one in origins)), ""),
    )  # fmt: skip


def _group(collective: Instruction) -> tuple[int, ...]:
    """The devices of the largest group: printed as axes of a mesh, as a reshaped range, as a list, or by pairs."""
    printed = collective.attributes.partition("replica_groups=")[2]
    if mesh := re.match(rf"mesh\[([^\]]*)\](?:, device_ids=\({_RANGE}\))? \{{([^}}]*)\}}", printed):
        axes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        sizes, chosen = [*map(int, axes.values())], [[*axes].index(name) for name in re.findall(r"'([^']+)'", mesh[4])]
        count = math.prod(sizes[dim] for dim in chosen)
        devices = _reshaped(mesh[2], mesh[3]) if mesh[2] else np.arange(math.prod(sizes))
        by_group = np.moveaxis(devices.reshape(sizes), chosen, range(-len(chosen), 0))
        return tuple(by_group.reshape(-1, count)[0].tolist())
    if iota := re.match(rf"\[(\d+),(\d+)\]<={_RANGE}", printed):
        return tuple(_reshaped(iota[3], iota[4])[: int(iota[2])].tolist())
    if listed := re.match(r"\{\{[\d,{}]+\}\}", printed):
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"[\d,]+(?=\})", listed[0])]
        return max(groups, key=len)  # the first, if they are equally large
    if pairs := _pairs(collective):
        return tuple(sorted({device for pair in pairs for device in pair}))
    if printed and not printed.startswith("{}"):
        said = "group not understood, all devices are assumed"
        collective.module.notes.append(f"collective {collective.name}: {said}")
    return tuple(range(collective.module.num_devices))


def _reshaped(sizes: str, order: str | None) -> np.ndarray:
    """Device numbers in the order of ``[sizes]T(order)``: counted up in these sizes, then transposed."""
    numbers = np.arange(math.prod(shape := [*map(int, sizes.split(","))])).reshape(shape)
    return numbers.transpose([*map(int, order.split(","))] if order else [*range(len(shape))]).reshape(-1)


def _phases(computation: Computation, collectives: dict[str, Collective], before: str) -> dict[str, str]:
    scopes = {name: _phase_by_scope(inner) for name, inner in computation.items()}
    scopes |= {name: phase for name, one in collectives.items() if (phase := phase_of_name(one.op_name))}
    feeds_backward: set[str] = set()  # or feeds a gradient reduction
    for name, inner in reversed(computation.items()):
        in_branches = map(_collective, inner.within()) if inner.opcode == "conditional" else ()
        issued = filter(None, (collectives.get(name), *in_branches))
        reduces_gradients = any(one.kind in REDUCTIONS and one.is_gradients for one in issued)
        if reduces_gradients or name in feeds_backward or scopes[name] == "backward":
            feeds_backward.update(inner.operands)
    after_backward: set[str] = set()
    phases = {}
    for name, inner in computation.items():
        if scopes[name] == "backward" or not after_backward.isdisjoint(inner.operands):
            after_backward.add(name)
        unmarked = "backward" if name in feeds_backward else "optimizer"
        phases[name] = scopes[name] or (unmarked if name in after_backward else before)
    return phases


def _phase_by_scope(instruction: Instruction) -> str:
    """The phase of most of an instruction's arithmetic, by its scopes; empty if they imply none."""
    flops: Counter[str] = Counter()
    for inner in instruction.within():
        is_caller = inner.opcode in ("fusion", "while", "call", "conditional")
        if not (is_caller or _kind(inner)) and (phase := phase_of_name(inner.op_name)):
            flops[phase] += arithmetic(inner).flops  # type: ignore[assignment]
    if not any(flops.values()):
        return "optimizer" if OPTIMIZER_SCOPE in instruction.op_name else ""
    return flops.most_common(1)[0][0]


def _named(instruction: Instruction, after: Callable[[Instruction], list[Instruction]]) -> list[Instruction]:
    """The instruction, or the first ones with names on the ways from it: XLA names no merged collective."""
    found, unnamed, seen = [], [instruction], set()
    while unnamed:
        one = unnamed.pop()
        if one.name not in seen:
            seen.add(one.name)
            found += [one] if one.op_name else []
            unnamed += [] if one.op_name else after(one)
    return sorted(found, key=lambda one: "transpose(" not in one.op_name)  # the backward's first


def phase_of_name(op_name: str, is_sent: bool = False) -> str:
    """The phase that JAX's name of an operation says, of what is sent also within strategies; empty if it says none."""
    if OPTIMIZER_SCOPE in op_name:
        return "optimizer"
    # What is not sent and has a name of a strategy or of metrics is arithmetic around a reduction.
    if "transpose(" in op_name and (is_sent or not (SYNC_SCOPE in op_name or METRICS_SCOPE in op_name)):
        return "backward"
    return "forward" if is_sent and "jvp(" in op_name else ""


def _kind(instruction: Instruction) -> str:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in HLO_KINDS else ""


def _pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    found = re.findall(r"(\d+),(\d+)", instruction.attribute("source_target_pairs"))
    return tuple((int(source), int(target)) for source, target in found)


def walk(
    operations: tuple[Operation, ...], around: tuple[Operation, ...] = (), times: int = 1
) -> Iterator[tuple[Operation, tuple[Operation, ...], int]]:
    """Gives operations and those of their bodies, each with those in whose bodies it is, and how often it runs."""
    for operation in operations:
        yield operation, around, times
        yield from walk(operation.body, (*around, operation), times * operation.trips)
