"""How the compile benchmark shows what it found: medians over the rounds, and beside them their least and most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from ..harness.tables import NOTHING, Column, markdown_table, terminal_table
from .points import PARTS, TRACE_AND_COMPILE, Point

Row = Mapping[str, Any]


def _cell(form: Callable[[Point, Sequence[str], str], str], parts: Sequence[str], clock: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if "curve" not in row or not (point := Point.of(row)).has(*parts):
            return NOTHING
        return form(point, parts, clock)

    return cell


def _median(point: Point, parts: Sequence[str], clock: str) -> str:
    return f"{point.median_s(*parts, clock=clock):.3g}"


def _min_max(point: Point, parts: Sequence[str], clock: str) -> str:
    rounds = point.rounds(*parts, clock=clock)
    return f"{min(rounds):.3g}-{max(rounds):.3g}" if len(rounds) > 1 else NOTHING


def _columns(form: Callable[[Point, Sequence[str], str], str]) -> list[Column]:
    timed: dict[str, tuple[Sequence[str], str]] = {part: ((part,), "wall_s") for part in PARTS}
    timed |= {"trace and compile": (TRACE_AND_COMPILE, "wall_s"), "CPU": (TRACE_AND_COMPILE, "cpu_s")}
    return [Column(name, "s", _cell(form, parts, clock)) for name, (parts, clock) in timed.items()]


_SIZE = (
    Column("curve", "", lambda row: row["part"], is_text=True),
    Column("size", "", lambda row: f"{row['size']:,}" if "size" in row else NOTHING),
)
_ROUNDS = Column(
    "rounds", "", lambda row: str(max(map(len, row["seconds"].values()))) if row.get("seconds") else NOTHING
)
_TABLES = {
    "seconds to compile, medians over rounds": (
        *_SIZE,
        *_columns(_median),
        Column("collectives", "", lambda row: str(row.get("planned", NOTHING))),
        Column("check", "", lambda row: row["check"], is_text=True),
    ),
    "least and most of the rounds": (*_SIZE, _ROUNDS, *_columns(_min_max)),
}


def print_tables(console: Console, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Prints rows of both curves, and notes below them."""
    for title, columns in _TABLES.items():
        console.print()
        console.print(terminal_table(rows, columns, title))
    for note in notes:
        console.print(f"[dim]{note}[/dim]", soft_wrap=True)


def markdown(rows: Sequence[Row]) -> list[list[str]]:
    """Lays rows of both curves out in tables of Markdown: medians, and the least and most of the rounds."""
    return [markdown_table(rows, columns) for columns in _TABLES.values()]
