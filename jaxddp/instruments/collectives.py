"""The collectives of anybody's program: how large, how often, in which phase, and the line that asked for them."""

import math
import os
import tempfile
import types
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..table import table
from . import targets
from .schedule import REDUCTIONS, Collective, Operation, phase_of_name, read_schedule, walk

MICROBATCHES, LAYERS, LOOP = "micro-batches", "layers", "loop"


class Loop(NamedTuple):
    """A loop around a collective."""

    kind: str  # "micro-batches" if it holds forward and backward, "layers" if it is part of one of them, else "loop"
    trips: int  # its iterations; 1 where the program does not say, which is among the notes


@dataclass(frozen=True)
class Found:
    """A collective of a compiled program, and others that are the same from the same line."""

    kind: str  # such as "all-reduce"
    num_bytes: int  # of the full buffer of one: the input of a reduce-scatter, the output of an all-gather
    dtype: str  # of the buffer, in HLO's spelling
    num_ranks: int  # devices that take part in one; of a permutation, all along its axes where a mesh says so
    axes: tuple[str, ...] | None  # the mesh axes that they lie along; None where no mesh is known that says so
    count: int  # how often in one call, with all iterations of the loops around it; at most, if it is in a branch
    phase: str  # "forward", "backward" or "optimizer"
    loops: tuple[Loop, ...]  # around it, the innermost last
    is_hidden: bool  # whether the program computes between its start and its end
    source: str  # file:line of the code that asked for it; empty if the program does not say
    is_conditional: bool = False  # whether it is in a branch of a lax.cond, which may not run


@dataclass
class Collectives:
    """All collectives of one call of a program; printed, it is a table."""

    found: tuple[Found, ...]  # in the order of the schedule, without those of one device, which send nothing
    num_devices: int  # that it was compiled for
    notes: tuple[str, ...] = ()  # what could not be read, in words

    def __post_init__(self) -> None:
        # Sorted (kind, bytes) of every one, those of a loop once per iteration; bytes of the full buffers of all.
        self.pairs = sorted(pair for one in self.found for pair in [(one.kind, one.num_bytes)] * one.count)
        self.num_bytes = sum(num_bytes for _, num_bytes in self.pairs)

    def in_loops(self, kind: str = "") -> list[Found]:
        """Those in a loop; of one kind if it is given."""
        return [one for one in self.found if one.loops and kind in ("", one.kind)]

    def each_microbatch(self) -> list[Found]:
        """Reductions in a loop over micro-batches, where one after the loop would do."""
        return [one for one in self.found if one.kind in REDUCTIONS and MICROBATCHES in dict(one.loops)]

    def __str__(self) -> str:
        counts = Counter(kind for kind, _ in self.pairs)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "no collectives"
        lines = [f"{kinds} in one call on {self.num_devices} devices, {in_bytes(self.num_bytes)}"]
        if self.found:
            heads = ("kind", "size", "dtype", "ranks", "axes", "times", "phase", "in loops of", "hidden", "line")
            left = ("dtype", "axes", "phase", "in loops of", "hidden", "line")
            lines += ["", table(heads, [_cells(one) for one in self.found], left=left), ""]
        if again := self.each_microbatch():
            num_bytes = sum(one.num_bytes * one.count for one in again)
            lines.append(f"Reduced once per micro-batch: {len(again)} of these lines, {in_bytes(num_bytes)}.")
        if any(one.is_conditional for one in self.found):
            lines.append("Up to: in a branch of a lax.cond, counted as if every branch ran.")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]).rstrip()


def collectives(program: Any, *args: Any, target: str | None = None, **kwargs: Any) -> Collectives:
    """Reads the collectives of one call of a program off what it compiles to.

    Args:
        program: A function, jitted or not (``jax.jit``, ``jax.shard_map``, ``nnx.jit``); or one that is lowered or
            compiled already; or a file, or the text, of a scheduled HLO module.
        *args: The function's arguments: arrays or ``jax.ShapeDtypeStruct``, with the shardings that they have in a run.
        target: Compiles the function for machines that are not here, such as ``h100:8`` or ``v5p:128``: its mesh has as
            many devices, simulated ones (``jaxddp.simulate_devices``) or none (``jaxddp.targets.mesh``).
        **kwargs: The function's.

    Raises a ValueError if the target's compiler is not installed or its size not the mesh's, or a text cannot be read.
    """
    mesh, compiled = None, program
    if isinstance(program, jax.stages.Traced):
        program = program.lower()
    if callable(program) and not hasattr(program, "as_text"):
        if isinstance(program, types.MethodType) and hasattr(program, "trace"):  # which is that of the function alone
            program, args = program.__func__, (program.__self__, *args)
        jitted = program if hasattr(program, "trace") else jax.jit(program)  # pmap has none
        traced = jitted.trace(*args, **kwargs)
        traced = getattr(traced, "traced", traced)  # of nnx.jit
        mesh = targets.mesh_of(traced)
        if target is None:
            compiled = traced.lower().compile()
        else:
            machine = targets.target(target)
            with tempfile.TemporaryDirectory(prefix="jaxddp-") as folder:
                early = folder if machine.platform == "tpu" and " " not in folder else ""  # libtpu divides at spaces
                compiled = targets.start_compile_traced(machine, traced, early).result()
    elif args or kwargs or target is not None:
        raise ValueError("args and target must be left out for a program that is lowered already")
    elif hasattr(program, "compile"):
        compiled = program.compile()
    elif isinstance(program, (str, os.PathLike)):
        compiled = str(program).lstrip() if "\n" in str(program) else Path(program).read_text()
    schedule = read_schedule(compiled)
    counts: Counter[Found] = Counter()
    for one, around, times in walk(schedule.operations):
        if (sent := one.starts) is None or len(sent.group) == 1:
            continue
        # The name goes before the place: XLA pipelines some to places among operations of other phases.
        phase = phase_of_name(sent.op_name, is_sent=True) or one.phase
        loops = tuple(Loop(_kind_of(each), each.trips) for each in around if each.is_loop)
        is_hidden = any(other.total_work.flops for other in one.meanwhile)
        is_conditional = any(each.is_conditional for each in around)
        about = sent.kind, sent.num_bytes, sent.dtype, *_axes_of(mesh, schedule.num_devices, sent)
        counts[Found(*about, 0, phase, loops, is_hidden, sent.source, is_conditional)] += times
    found = tuple(replace(one, count=count) for one, count in counts.items())
    # A text from elsewhere may not say how many there are.
    num_devices = max([schedule.num_devices, *(one.num_ranks for one in found)])
    return Collectives(found, num_devices, schedule.notes)


def _kind_of(loop: Operation) -> str:
    # A loop whose collectives XLA has pipelined has no name; what is in it has that of the loop before "while/body".
    inside = (one.op_name.rpartition("/while/body")[0] for one in loop.body)
    name = loop.op_name or next(filter(None, inside), "")
    if "jvp(" in name or "transpose(" in name:  # within what is differentiated
        return LAYERS
    return MICROBATCHES if any("transpose(" in one.op_name for one in loop.body) else LOOP


def _axes_of(
    mesh: Mesh | AbstractMesh | None, num_devices: int, sent: Collective
) -> tuple[int, tuple[str, ...] | None]:
    """How many devices take part in one, and the axes of a mesh along which they lie; None if not all along some do."""
    if mesh is None or mesh.size != num_devices:
        return len(sent.group), None
    places = np.unravel_index(np.asarray(sent.pairs or [sent.group]), mesh.axis_sizes)  # [groups, devices] of each axis
    axes = tuple(name for name, at in zip(mesh.axis_names, places, strict=True) if np.ptp(at, axis=1).any())
    count = math.prod(mesh.shape[name] for name in axes)
    return (count, axes) if sent.pairs or count == len(sent.group) else (len(sent.group), None)


def in_bytes(num_bytes: int) -> str:
    """A size with its unit, such as ``4 KiB``."""
    power = min(3, max(0, num_bytes.bit_length() - 1) // 10)
    size, unit = num_bytes / 1024**power, ("B", "KiB", "MiB", "GiB")[power]
    return f"{size:,.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"


def loops_of(one: Found) -> str:
    """The loops around a collective, in words."""
    return " x ".join(f"{loop.trips} {loop.kind}" for loop in one.loops) or "-"


def _cells(one: Found) -> tuple[str, ...]:
    axes = "?" if one.axes is None else ", ".join(one.axes)
    times = f"up to {one.count:,}" if one.is_conditional else f"{one.count:,}"
    line = os.path.relpath(one.source) if one.source else "?"
    return (
        one.kind, in_bytes(one.num_bytes), one.dtype, str(one.num_ranks), axes, times, one.phase,
        loops_of(one), "yes" if one.is_hidden else "no", line,
    )  # fmt: skip
