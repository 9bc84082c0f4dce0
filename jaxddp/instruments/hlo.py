"""Parses the text of a compiled program (``Compiled.as_text()``, ``--xla_dump_to``).

A module is a list of computations, one of them the entry, each a list of instructions in the order of execution:

    %name = f32[8,4]{1,0} opcode(%operand, ...), attribute=value, ..., metadata={op_name="..."}, backend_config={...}
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..communication.buckets import dtype_bytes

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_NAME = re.compile(r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" ?(?P<opcode>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"(?:^|, )(?:to_apply|calls|body|condition|called_computations|branch_computations|(?:true|false)_computation)"
    r"=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]')
_COMMENT = re.compile(r"/\*.*?\*/")
_CUT_OFF = "the HLO module is cut off: it must end with the closing brace of its entry computation"
_OWN_FOLDER = f"{Path(__file__).parents[1]}/"  # its lines call collectives for those of users


class Array(NamedTuple):
    """One array of a shape; its dtype in HLO's spelling."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """1 for a scalar."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Size in bytes, without layout padding."""
        return self.num_elements * (1 if self.dtype == "pred" else dtype_bytes(self.dtype))


@dataclass
class Instruction:
    """One line of a program."""

    name: str  # unique within its computation
    opcode: str  # such as fusion or all-reduce-start
    shape: str  # shape of the result, as printed; for a tuple, all parts
    operands: tuple[str, ...]
    literal: str  # the text between the parentheses
    attributes: str  # the text after them
    is_root: bool
    computation: Computation = field(compare=False, repr=False)  # that it is in
    module: Module = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        self.op_name = found.group(1) if found else ""  # JAX's name stack
        names = [name for several, one in _CALLED.findall(self.attributes) for name in (several or one).split(",")]
        # What it refers to stands above it.
        self.called = [self.module.computations[name.strip().removeprefix("%")] for name in names]
        self.inputs = [self.computation[name] for name in self.operands]
        self.arrays = arrays_of(self.shape)  # of the result

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def source(self) -> str:
        """``file:line`` of the code that made it; empty if not said."""
        if old := re.search(r'source_file="([^"]*)" source_line=(\d+)', self.attributes):
            return f"{old[1]}:{old[2]}"
        said = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return self.module.sources.get(int(said[1]), "") if said else ""

    def within(self) -> Iterator[Instruction]:
        """Yields it and everything nested inside it."""
        yield self
        for called in self.called:
            for inner in called.values():
                yield from inner.within()

    def attribute(self, key: str) -> str:
        """An attribute, or a field of ``backend_config``, as printed without brackets or quotes; empty if absent."""
        found = re.search(rf'(?:^|[ ,{{])(?:{key}=|"{key}":)', self.attributes)
        if not found:
            return ""
        value = self.attributes[found.end() :]
        if value[:1] in ("{", "["):
            return value[1 : _closing(value, 0)]
        printed = re.match(r'"(?P<quoted>[^"]*)"|[^,}]*', value)
        return (printed["quoted"] or printed[0]) if printed else ""

    def integers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute such as ``dimensions={0,2}``."""
        return tuple(int(number) for number in re.findall(r"-?\d+", self.attribute(key)))


Computation = dict[str, Instruction]
"""Instructions by name, in the order in which they are printed."""


@dataclass
class Module:
    """A program."""

    num_devices: int  # that it was compiled for
    sources: dict[int, str]  # file:line by the number of a stack frame, outside of libraries if it can be
    computations: dict[str, Computation] = field(default_factory=dict)
    entry: Computation = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what its readers could not read, in words


@functools.lru_cache(maxsize=2)  # the readers of one program, one after the other
def parse_module(text: str) -> Module:
    """Parses a scheduled program; a ValueError if it is none, or is cut."""
    if not text.startswith("HloModule"):
        raise ValueError(f"text (={text[:40]!r}...) must be a compiled HLO module, as Compiled.as_text() gives it")
    header, *lines = text.split("\n")  # not splitlines(): names may hold other separators
    if not text.rstrip().rpartition("\n")[2].startswith("}"):
        raise ValueError(_CUT_OFF)
    if "is_scheduled=true" not in header:
        raise ValueError("the HLO module is not scheduled: compile it first, lowered.compile().as_text()")
    counts = dict(re.findall(r"(num_partitions|replica_count)=(\d+)", header))
    module = Module(math.prod(map(int, counts.values())), _sources(text))
    current: Computation | None = None
    for number, line in enumerate(lines, 2):
        if current is not None and line.startswith("}"):
            current = None
        elif current is not None:
            if instruction := _parse_instruction(line, current, module):
                current[instruction.name] = instruction
            elif line.strip():
                raise ValueError(f"line {number} of the HLO module (={line.strip()[:60]!r}...) is no instruction")
        elif found := _HEADER.match(line):
            if found["name"] in module.computations:
                raise ValueError(f"line {number} begins {found['name']!r} again: it must be one HLO module")
            current = module.computations[found["name"]] = {}
            module.entry = current if found["entry"] else module.entry
    if not module.entry or current is not None:
        raise ValueError(_CUT_OFF)
    return module


def _sources(text: str) -> dict[int, str]:
    """Reads the tables of files, places and stack frames that stand before the first computation, if there are any."""
    tables = dict(re.findall(r"^(\w+)\n((?:\d+ .*\n)+)", text, re.MULTILINE))
    rows = {
        "FileNames": r'^(\d+) "(.*)"$',
        "FileLocations": r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)",
        "StackFrames": r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)",
    }
    names, places, frames = (re.findall(row, tables.get(title, ""), re.MULTILINE) for title, row in rows.items())
    files = dict(names)
    lines = {place: f"{files[file]}:{line}" for place, file, line in places}
    # Frame 1 has no caller. Where it is said to be its own, all callers are one too large.
    shift = int(frames[0][2]) if frames else 0
    of_users: dict[int, str] = {}  # the nearest caller outside of libraries
    for number, (_, place, caller) in enumerate(frames, 1):
        of_users[number] = lines[place]
        if any(part in lines[place] for part in ("site-packages", "dist-packages", _OWN_FOLDER)):
            of_users[number] = of_users.get(min(number - 1, int(caller) - shift), "")
    return {number: of_users[number] or lines[place] for number, (_, place, _) in enumerate(frames, 1)}


@functools.lru_cache(maxsize=4096)
def arrays_of(shape: str) -> tuple[Array, ...]:
    """Lists the arrays of a printed shape such as ``(f32[2,3]{1,0}, s32[])``."""
    found = _ARRAY.findall(shape)
    return tuple(Array(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)) for dtype, dims in found)


def parts_of(shape: str) -> tuple[str, ...]:
    """The parts of the printed shape of a tuple; empty for an array."""
    if not shape.startswith("("):
        return ()
    parts, depth, start, inside = [], 0, 0, _COMMENT.sub("", shape[1:-1]) + ","
    for index, char in enumerate(inside):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(inside[start:index].strip())
            start = index + 1
    return tuple(parts)


def root_of(computation: Computation) -> Instruction:
    """The root instruction of a computation."""
    return next(instruction for instruction in computation.values() if instruction.is_root)


def _parse_instruction(line: str, computation: Computation, module: Module) -> Instruction | None:
    if not (named := _NAME.match(line)):
        return None
    start = named.end()
    end = _closing(line, start) + 1 if line.startswith("(", start) else line.find(" ", start)
    opcode = _OPCODE.match(line, end)
    if end <= 0 or not opcode or (closing := _closing(line, opcode.end() - 1)) < 0:
        return None
    literal = line[opcode.end() : closing]
    operands: list[str] = []
    if opcode["opcode"] not in ("parameter", "constant"):
        # Without percent signs, perhaps with shapes: the name is the last word.
        operands = re.findall(r"%([\w.\-]+)", literal) or [one.split()[-1] for one in parts_of(f"({literal})") if one]
    return Instruction(
        named["name"], opcode["opcode"], line[start:end], tuple(operands), literal, line[closing + 1 :].lstrip(", "),
        bool(named["root"]), computation, module,
    )  # fmt: skip


def _closing(line: str, start: int) -> int:
    """Index of the bracket that closes the one at ``start``, ignoring quoted text; -1 if there is none."""
    depth = 0
    for match in _BRACKET.finditer(line, start):
        char = match.group()  # or quoted text
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return match.start()
    return -1
