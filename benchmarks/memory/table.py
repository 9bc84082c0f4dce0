"""How the memory benchmark shows and writes what it found."""

from __future__ import annotations

import dataclasses
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jaxlib
from rich import box
from rich.console import Console
from rich.table import Table

from jaxddp.memory import DeviceBytes

from ..results import commit, describe_machine
from .source import Figure
from .variants import Allocation, Setup

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant at one moment, in bytes on each device.

    Attributes:
        strategy: Its name.
        moment: In words.
        compiled: By component.
        formula: In all.
        allocated: In all; None where it was not run, or not of as many ranks.
        check: Of what lives across steps ``"ok"`` or what is wrong; else how far the program is from the formula.
    """

    strategy: str
    moment: str
    compiled: DeviceBytes
    formula: int
    allocated: int | None
    check: str

    @property
    def cells(self) -> list[str]:
        """What it shows in a table; ``_COLUMNS`` names it."""
        parts = self.compiled
        kinds = (parts.parameters, parts.optimizer_state, parts.activations, parts.gradients, parts.buckets)
        allocated = "not run" if self.allocated is None else mib(self.allocated)
        return [
            self.strategy, self.moment, *map(mib, kinds), mib(parts.total), mib(self.formula), allocated, self.check,
        ]  # fmt: skip


_COLUMNS = (
    ("strategy", ""), ("moment", ""), ("parameters", "MiB"), ("optimizer state", "MiB"), ("activations", "MiB"),
    ("gradients", "MiB"), ("buckets", "MiB"), ("compiled", "MiB"), ("formula", "MiB"), ("allocator", "MiB"),
    ("check", ""),
)  # fmt: skip
_WHY = "why they differ"
_SOURCE_COLUMNS = (
    ("the source's figure", ""), ("it says", "MiB"), ("corrected", "MiB"), ("here", "MiB"), (_WHY, ""),
)  # fmt: skip
_TEXT = {"strategy", "moment", "check", "the source's figure", _WHY}


def mib(num_bytes: float) -> str:
    """Writes bytes as MiB."""
    return f"{num_bytes / MIB:,.2f}"


def print_tables(
    console: Console, title: str, rows: Sequence[Row], compared: Sequence[Figure], notes: Sequence[str]
) -> None:
    """Prints what was found, and the source's figures beside it, if there are any."""
    console.print()
    console.print(_table(title, _COLUMNS, [row.cells for row in rows]))
    if compared:
        console.print(_table("beside the source's", _SOURCE_COLUMNS, [_figure_cells(one) for one in compared]))
    for note in notes:
        console.print(f"[dim]{note}[/dim]", soft_wrap=True)


def write_tables(
    folder: Path,
    setup: Setup,
    rows: Sequence[Row],
    compared: Sequence[Figure],
    allocated: Mapping[str, Allocation | str],
    notes: Sequence[str],
) -> None:
    """Appends what was found to ``metrics.jsonl``, in bytes, and writes ``table.md``."""
    record = {"benchmark": "memory", **dataclasses.asdict(setup), "dtype": "float32", "commit": commit()}
    record |= describe_machine()
    record["versions"] = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "python": platform.python_version()}
    record["command"] = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    lines: list[dict[str, Any]] = [dataclasses.asdict(row) for row in rows]
    lines += [{"figure": figure._asdict(), "check": "-"} for figure in compared]
    for name, said in allocated.items():
        lines.append({"strategy": name, "allocator": said if isinstance(said, str) else said._asdict(), "check": "-"})
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record | line) + "\n" for line in lines)
    body = _markdown(_COLUMNS, [row.cells for row in rows])
    if compared:
        body += ["", *_markdown(_SOURCE_COLUMNS, [_figure_cells(one) for one in compared])]
    (folder / "table.md").write_text("\n".join([*body, "", *(f"- {note}" for note in notes), ""]))


def _figure_cells(figure: Figure) -> list[str]:
    corrected = "-" if figure.corrected is None else mib(figure.corrected)
    return [figure.name, f"{figure.says_mib:,.7g}", corrected, mib(figure.here), figure.why]


def _table(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, unit in columns:
        justify: Literal["left", "right"] = "left" if name in _TEXT else "right"
        table.add_column(f"{name}\n[dim]{unit}[/dim]", justify=justify, no_wrap=name != _WHY)
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous is not None and columns is _COLUMNS and previous[0] != row[0]:
            table.add_section()
        table.add_row(*row, style="bold red" if row[-1].startswith("WRONG") else None)
    return table


def _markdown(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> list[str]:
    names = [f"{name}, {unit}" if unit else name for name, unit in columns]
    return ["| " + " | ".join(cells) + " |" for cells in (names, ["---"] * len(names), *rows)]
