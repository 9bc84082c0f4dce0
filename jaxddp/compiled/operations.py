"""The operations of a compiled program: what each computes or communicates, and in which phase of the step.

    optimizer  what the optimizer's scope names, and what depends on the backward without feeding a reduction
    backward   arithmetic that JAX marks ``transpose(``; and packing, which feeds a reduction of gradients
    forward    the rest

Collectives are issued by a start and waited for by a done, or both at once where they are synchronous.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..scopes import METRICS_SCOPE, OPTIMIZER_SCOPE, SYNC_SCOPE
from .hlo import Computation, Instruction, Module
from .work import Work, WorkCounter

KINDS = (
    "all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip
REDUCTIONS = ("all-reduce", "reduce-scatter")
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        kind: One of ``KINDS``.
        num_bytes: Bytes of the full buffer on the wire: of the input of a reduce-scatter, of the output of an
            all-gather.
        group: Numbers of the devices that take part, those of the first group.
        is_async: Whether it is started and waited for apart, and not marked synchronous.
        kernel: The backend's name for how it is carried out; empty if it does not say.
        op_name: The name stack of the Python that asked for it.
    """

    kind: str
    num_bytes: int
    group: tuple[int, ...] = ()
    is_async: bool = False
    kernel: str = ""
    op_name: str = ""

    @property
    def is_metrics(self) -> bool:
        """Whether it reduces the loss and metrics, not gradients."""
        return METRICS_SCOPE in self.op_name


@dataclass(frozen=True)
class Operation:
    """One instruction of a schedule.

    Attributes:
        name: The instruction's.
        phase: One of ``PHASES``.
        work: What it costs the device; nothing for collectives.
        starts: The collective that it issues; None if it issues none.
        waits_for: Name of the operation whose collective it waits for, its own if it both issues one and waits for it;
            empty if it does not wait.
        body: What a loop that communicates repeats, or a call that communicates carries out.
        trips: How often it does.
        op_name: The name stack of the Python that asked for it.
        operands: Names of the operations whose results it needs.
    """

    name: str
    phase: str = "forward"
    work: Work = field(default_factory=Work)
    starts: Collective | None = None
    waits_for: str = ""
    body: tuple[Operation, ...] = ()
    trips: int = 1
    op_name: str = ""
    operands: tuple[str, ...] = ()

    @property
    def total_work(self) -> Work:
        """Its work, with that of its body times the trips."""
        return self.work + sum((inner.total_work for inner in self.body), Work()).times(self.trips)


class OperationReader:
    """Turns the instructions of a module into operations.

    Attributes:
        counter: Counts their work, and notes what it cannot.
        num_devices: That the module was compiled for.
    """

    def __init__(self, module: Module) -> None:
        """Reads the module's header; ``read`` does the rest."""
        self.module = module
        self.counter = WorkCounter(module)
        counts = [re.search(rf"{key}=(\d+)", module.header) for key in ("num_partitions", "replica_count")]
        self.num_devices = math.prod(int(count.group(1)) if count else 1 for count in counts)

    def read(self, computation: Computation) -> tuple[Operation, ...]:
        """Gives the operations of one of its computations, in the order in which they are issued."""
        collectives = {name: self._collective(inner, computation) for name, inner in computation.items()}
        phases = self._phases(computation, collectives)
        return tuple(
            self._operation(inner, computation, phases[name], collectives[name]) for name, inner in computation.items()
        )

    def _operation(
        self, instruction: Instruction, computation: Computation, phase: str, collective: Collective | None
    ) -> Operation:
        name, opcode = instruction.name, instruction.opcode
        common: dict[str, Any] = {
            "name": name, "phase": phase, "op_name": instruction.op_name, "operands": instruction.operands,
        }  # fmt: skip
        if opcode in ("while", "call") and any(_kind(inner) for inner in self.module.within(instruction)):
            trips = self.counter.trip_count(instruction) if opcode == "while" else 1
            if trips is None:
                self._note(f"loop {name}: trip count unknown, its collectives are counted once")
            bodies = [self.read(called) for called in self.module.called(instruction)]
            return Operation(**common, body=sum(bodies, ()), trips=1 if trips is None else trips)
        if collective is None and opcode.endswith("-done") and (start := self._started_by(instruction, computation)):
            return Operation(**common, waits_for=start)
        work = self.counter.of(instruction, computation)
        if collective is None:
            return Operation(**common, work=work)
        started_only = opcode.endswith("-start") and not opcode.startswith("copy")
        return Operation(**common, work=work, starts=collective, waits_for="" if started_only else name)

    def _started_by(self, done: Instruction, computation: Computation) -> str:
        """Name of the start of the collective that a done waits for; empty if it waits for something else."""
        start = computation.get(done.operands[0]) if done.operands else None
        while start is not None and start.opcode.endswith("-update"):
            start = computation.get(start.operands[0])
        return start.name if start is not None and self._collective(start, computation) else ""

    def _collective(self, instruction: Instruction, computation: Computation) -> Collective | None:
        """The collective that an instruction issues: itself, or the first one inside of what it calls."""
        if instruction.opcode in ("while", "call") or instruction.opcode.endswith(("-done", "-update")):
            return None
        inner, where = instruction, computation
        if not _kind(instruction):
            within = _with_computation(self.module, instruction, computation)
            found = [(other, called) for other, called in within if _kind(other)]
            if not found:
                return None
            if len(found) > 1:
                named = f"{instruction.opcode} {instruction.name}"
                self._note(f"{named}: holds {len(found)} collectives, only the first is counted")
            inner, where = found[0]
        kind = _kind(inner)
        is_async = instruction.opcode.endswith("-start") and instruction.config("is_sync") != "true"
        return Collective(
            kind, _full_bytes(kind, inner, where), self._group(inner), is_async,
            _kernel(inner, instruction),
            inner.op_name or instruction.op_name,
        )  # fmt: skip

    def _group(self, instruction: Instruction) -> tuple[int, ...]:
        printed = instruction.attributes.partition("replica_groups=")[2]
        if mesh := re.match(r"mesh\[([^\]]*)\] \{((?:'[^']+'(?:, ?)?)+)\}", printed):
            axes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
            sizes = [int(size) for size in axes.values()]
            chosen = [list(axes).index(axis) for axis in re.findall(r"'([^']+)'", mesh.group(2))]
            ids = np.arange(math.prod(sizes)).reshape(sizes)
            others = [dim for dim in range(len(sizes)) if dim not in chosen]
            count = math.prod(sizes[dim] for dim in chosen)
            return tuple(int(device) for device in ids.transpose(others + chosen).reshape(-1, count)[0])
        if iota := re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", printed):
            dims = [int(dim) for dim in iota.group(3).split(",")]
            order = [int(dim) for dim in iota.group(4).split(",")] if iota.group(4) else list(range(len(dims)))
            ids = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(-1, int(iota.group(2)))
            return tuple(int(device) for device in ids[0])
        if listed := re.match(r"\{\{([\d,]+)\}", printed):
            return tuple(int(device) for device in listed.group(1).split(","))
        if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", instruction.attributes):
            return tuple(int(device) for device in pairs.groups())
        if printed and not printed.startswith("{}"):
            self._note(f"collective {instruction.name}: group not understood, it counts as that of all devices")
        return tuple(range(self.num_devices))

    def _note(self, text: str) -> None:
        if text not in self.counter.notes:
            self.counter.notes.append(text)

    def _phases(self, computation: Computation, collectives: dict[str, Collective | None]) -> dict[str, str]:
        marks = {name: self._mark(inner, computation) for name, inner in computation.items()}
        gradients_reduced = {name for name, c in collectives.items() if c and c.kind in REDUCTIONS and not c.is_metrics}
        feeds_backward: set[str] = set()  # or a reduction of gradients
        for name, inner in reversed(computation.items()):
            if name in gradients_reduced or name in feeds_backward or marks[name] == "backward":
                feeds_backward.update(inner.operands)
        after_backward: set[str] = set()
        phases = {}
        for name, inner in computation.items():
            if marks[name] == "backward" or any(operand in after_backward for operand in inner.operands):
                after_backward.add(name)
            if marks[name]:
                phases[name] = marks[name]
            elif name not in after_backward:
                phases[name] = "forward"
            else:
                phases[name] = "backward" if name in feeds_backward else "optimizer"
        return phases

    def _mark(self, instruction: Instruction, computation: Computation) -> str:
        """What an instruction's scopes say of its phase, by where most of its arithmetic belongs."""
        flops = {"backward": 0.0, "optimizer": 0.0}
        for inner, where in _with_computation(self.module, instruction, computation):
            if inner.opcode in ("fusion", "while", "call", "conditional") or _kind(inner):
                continue
            mark = _scope_of(inner.op_name)
            if mark:
                flops[mark] += self.counter.arithmetic(inner, where).flops
        if not any(flops.values()):
            return "optimizer" if OPTIMIZER_SCOPE in instruction.op_name else ""
        return max(flops, key=lambda phase: flops[phase])


def _scope_of(op_name: str) -> str:
    if OPTIMIZER_SCOPE in op_name:
        return "optimizer"
    if "transpose(" in op_name and SYNC_SCOPE not in op_name and METRICS_SCOPE not in op_name:
        return "backward"
    return ""


def _with_computation(
    module: Module, instruction: Instruction, computation: Computation
) -> Iterator[tuple[Instruction, Computation]]:
    yield instruction, computation
    for called in module.called(instruction):
        for inner in called.values():
            yield from _with_computation(module, inner, called)


def _kind(instruction: Instruction) -> str:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def _kernel(collective: Instruction, holder: Instruction) -> str:
    """GPUs' ``kernel_strategy``; the ``emitter`` of a TPU's fusion, which does something else with it."""
    strategy = collective.config("kernel_strategy") or holder.config("kernel_strategy")
    return strategy.removeprefix("KERNEL_STRATEGY_") or (holder.config("emitter") if holder is not collective else "")


def _full_bytes(kind: str, instruction: Instruction, computation: Computation) -> int:
    if kind == "all-gather":
        sizes = [array.num_bytes for array in instruction.arrays]
        # The start of an asynchronous gather gives (inputs, outputs), as many of each.
        return sum(sizes[len(sizes) // 2 :] if instruction.opcode.endswith("-start") else sizes)
    # A ragged exchange also takes where its result goes, offsets and sizes.
    sent = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
    return sum(computation[name].num_bytes for name in sent if name in computation)
