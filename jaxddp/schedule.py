"""Reads a compiled program: which collectives it holds, of how many bytes, and where in its schedule they stand.

XLA prints a compiled program as text in which, once scheduled, the order of the instructions is the order in which
they are issued. Instructions carry the name stack of the traced Python (``op_name``): JAX writes ``transpose(`` into
the stack of what a backward pass computes, and the trainer names its own parts.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .buckets import dtype_bytes

METRICS_SCOPE = "jaxddp.metrics"
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all", "collective-broadcast")

_HLO_DTYPES = {"pred": "bool"}
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"\b(pred|bf16|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|called_computations|branch_computations)=\{?%?([\w.\-, %]+)\}?")


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    opcode: str
    shape: str
    rest: str  # operands and attributes, as printed

    @property
    def op_name(self) -> str:
        """The name stack of the Python that asked for it; empty if there is none."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found.group(1) if found else ""

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
        kind: One of ``KINDS``.
        num_bytes: Bytes of the full buffer on the wire: of the input of a reduce-scatter, of the output of an
            all-gather.
        position: Index of the instruction in the entry computation that is it, starts it or contains it.
        op_name: Its name stack.
    """

    kind: str
    num_bytes: int
    position: int
    op_name: str

    @property
    def is_metrics(self) -> bool:
        """Whether it reduces the loss and metrics, not gradients."""
        return METRICS_SCOPE in self.op_name


class Program(NamedTuple):
    """The instructions of a scheduled program, by computation."""

    entry: list[Instruction]
    others: dict[str, list[Instruction]]

    def collectives(self) -> list[Collective]:
        """All collectives, in schedule order; those inside a loop or call count once and stand where it stands."""
        found = []
        for position, instruction in enumerate(self.entry):
            for computation, inner in self._with_called(instruction, self.entry):
                kind = inner.opcode.removesuffix("-start")
                if kind in KINDS:
                    num_bytes = _full_bytes(kind, inner, computation)
                    found.append(Collective(kind, num_bytes, position, inner.op_name))
        return found

    def last_backward(self) -> int:
        """Position of the last operation that belongs to the backward pass; -1 if there is none."""
        positions = [
            position
            for position, instruction in enumerate(self.entry)
            if any(
                "transpose(" in inner.op_name and inner.opcode.removesuffix("-start") not in KINDS
                for _, inner in self._with_called(instruction, self.entry)
            )
        ]
        return max(positions, default=-1)

    def _with_called(
        self, instruction: Instruction, computation: list[Instruction]
    ) -> list[tuple[list[Instruction], Instruction]]:
        found = [(computation, instruction)]
        for names in _CALLED.findall(instruction.rest):
            for name in re.split(r"[, %]+", names):
                for inner in self.others.get(name, []):
                    found += self._with_called(inner, self.others[name])
        return found


def read_program(compiled: Any) -> Program:
    """Reads a compiled program.

    Args:
        compiled: A ``jax.stages.Compiled``, or the text of one.

    Returns:
        Its instructions.

    Raises:
        ValueError: If the text is not of a scheduled HLO module.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if not text.startswith("HloModule"):
        raise ValueError(f"text (={text[:40]!r}...) must be a compiled HLO module, as Compiled.as_text() gives it")
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("the HLO module is not scheduled: compile it first, lowered.compile().as_text()")
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = header.group(2)
            computations[current] = []
            entry = current if header.group(1) else entry
        elif current and (found := _INSTRUCTION.match(line)):
            computations[current].append(Instruction(*found.group("name", "opcode", "shape", "rest")))
    if not entry:
        raise ValueError("the HLO module has no entry computation: the text is cut off")
    return Program(computations.pop(entry), computations)


def gradient_collectives(compiled: Any) -> list[tuple[str, int]]:
    """Lists what a compiled step communicates, leaving out its loss and metrics.

    Args:
        compiled: A ``jax.stages.Compiled``, or the text of one.

    Returns:
        Sorted ``(kind, bytes)``, to be compared with the sorted plan.
    """
    return sorted((c.kind, c.num_bytes) for c in read_program(compiled).collectives() if not c.is_metrics)


def _full_bytes(kind: str, instruction: Instruction, computation: list[Instruction]) -> int:
    if kind == "all-gather":
        parts = _shape_bytes(instruction.shape)
        # The start of an asynchronous gather gives (inputs, outputs), as many of each.
        return sum(parts[len(parts) // 2 :] if instruction.opcode.endswith("-start") else parts)
    shapes = {inner.name: inner.shape for inner in computation}
    return sum(sum(_shape_bytes(shapes[name])) for name in instruction.operands if name in shapes)


def _shape_bytes(shape: str) -> list[int]:
    sizes = []
    for dtype, dims in _SHAPE.findall(shape):
        num_elements = 1
        for dim in dims.split(","):
            num_elements *= int(dim) if dim else 1
        sizes.append(num_elements * dtype_bytes(_HLO_DTYPES.get(dtype, dtype)))
    return sizes
