"""Reads a compiled step: what it communicates, where in its schedule, and what it computes in between.

A scheduled program is a list of operations (``operations.py``) in the order in which they are issued. A collective
counts as in flight during the backward if backward arithmetic stands between its start and its done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .hlo import parse_module
from .operations import PHASES as PHASES
from .operations import Collective as Collective
from .operations import Operation as Operation
from .operations import OperationReader
from .work import Work


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, as the compiler laid them out."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take the place of arguments
    temporaries: int
    peak: int


@dataclass(frozen=True)
class Overlap:
    """How a step's gradient collectives lie to its backward.

    Attributes:
        first_start_fraction: Share of the backward's FLOPs issued before the first gradient collective starts; None
            without one.
        bytes_in_flight: Bytes of collectives that have backward arithmetic between start and done.
        bytes_started_after_backward: Bytes of collectives that start after the backward's last arithmetic.
        num_bytes: Bytes of all gradient collectives.
    """

    first_start_fraction: float | None
    bytes_in_flight: int
    bytes_started_after_backward: int
    num_bytes: int


@dataclass(frozen=True)
class Schedule:
    """A compiled step.

    Attributes:
        operations: In the order in which they are issued.
        num_devices: That it was compiled for.
        notes: What could not be read, in words.
        memory: Of one device; None if only the text was given.
    """

    operations: tuple[Operation, ...]
    num_devices: int = 1
    notes: tuple[str, ...] = ()
    memory: Memory | None = None

    def collectives(self) -> list[Collective]:
        """All collectives that the step carries out, in schedule order; those of a loop as often as it repeats them."""
        return [operation.starts for operation in _walk(self.operations) if operation.starts]

    def gradient_collectives(self) -> list[tuple[str, int]]:
        """Sorted ``(kind, bytes)`` of all collectives but those of the loss and metrics."""
        return sorted((c.kind, c.num_bytes) for c in self.collectives() if not c.is_metrics)

    def work(self) -> Work:
        """All that one device computes."""
        return sum((operation.total_work for operation in self.operations), Work())

    def backward_end(self) -> int:
        """Position after the last arithmetic of the backward; 0 if there is none."""
        return max((place + 1 for place, op in enumerate(self.operations) if _is_backward_arithmetic(op)), default=0)

    def overlap(self) -> Overlap:
        """Says how the gradient collectives lie to the backward."""
        issued = np.cumsum([0.0] + [op.total_work.flops if op.phase == "backward" else 0.0 for op in self.operations])
        end = self.backward_end()
        done = {op.waits_for: place for place, op in enumerate(self.operations) if op.waits_for}
        placed = enumerate(self.operations)
        gradients = [(place, op, [c for c in _collectives_of(op) if not c.is_metrics]) for place, op in placed]
        starts = [(place, op, found) for place, op, found in gradients if found]
        late = in_flight = total = 0
        for place, op, found in starts:
            num_bytes = sum(c.num_bytes for c in found)
            total += num_bytes
            late += num_bytes if place >= end else 0
            in_flight += num_bytes if issued[done.get(op.name, place)] > issued[place + 1] else 0
        first = float(issued[starts[0][0]] / issued[-1]) if starts and issued[-1] else None
        return Overlap(first, in_flight, late, total)


def read_schedule(compiled: Any) -> Schedule:
    """Reads a compiled program.

    Args:
        compiled: A ``jax.stages.Compiled``, a ``TargetProgram``, or the text of one.

    Returns:
        Its schedule.

    Raises:
        ValueError: If the text is not of a scheduled HLO module, or is cut off.
    """
    module = parse_module(compiled)
    reader = OperationReader(module)
    operations = reader.read(module.computations[module.entry])
    memory = None if isinstance(compiled, str) else _memory(compiled)
    return Schedule(operations, reader.num_devices, tuple(reader.counter.notes), memory)


def gradient_collectives(compiled: Any) -> list[tuple[str, int]]:
    """Lists what a compiled step communicates, leaving out its loss and metrics.

    Args:
        compiled: A ``jax.stages.Compiled``, or the text of one.

    Returns:
        Sorted ``(kind, bytes)``, to be compared with the sorted plan.
    """
    return read_schedule(compiled).gradient_collectives()


def _collectives_of(operation: Operation) -> list[Collective]:
    return [inner.starts for inner in _walk((operation,)) if inner.starts]


def _walk(operations: tuple[Operation, ...]) -> Iterator[Operation]:
    for operation in operations:
        yield operation
        for _ in range(operation.trips if operation.body else 0):
            yield from _walk(operation.body)


def _is_backward_arithmetic(operation: Operation) -> bool:
    return operation.phase == "backward" and operation.total_work.flops > 0


def _memory(compiled: Any) -> Memory:
    stats = compiled.memory_analysis()
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, temporaries = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    peak = arguments + outputs - aliased + temporaries
    return Memory(arguments, outputs, aliased, temporaries, peak)
