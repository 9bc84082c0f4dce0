"""Tables of rows: one description of the columns serves the terminal, ``table.md`` and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from .values import NONE, Row, check, cut, is_bad, number, short, text

PLAIN = str.maketrans({NONE: "-", "\N{GREEK SMALL LETTER MU}": "u"})  # for consoles without UTF-8


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        of: A row's value: text, a number, a tuple of numbers, or None.
        unit: Shown below the heading.
        form: Formats a value that is not text.
        is_wide: Left out on consoles.
    """

    name: str
    of: Callable[[Row], Any]
    unit: str = ""
    form: Callable[[Any], str] = short
    is_wide: bool = False

    def cell(self, row: Row) -> str:
        """The text that a row shows in this column."""
        value = self.of(row)
        return NONE if value is None or value == "" else cut(value) if isinstance(value, str) else self.form(value)

    def is_numeric(self, rows: Sequence[Row]) -> bool:
        """Whether a row has a number here; the column is then aligned to the right."""
        return any(sort_key(self.of(row)) is not None for row in rows)


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: From left to right; the first one's cells are row headings.
        note: Explains the columns, below the table.
        group: Groups of rows are separated on the console.
        is_brief: Which rows a console shows; all of them if None.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""
    group: Callable[[Row], Any] | None = None
    is_brief: Callable[[Row], bool] | None = None

    def filled(self) -> list[Column]:
        """The first column, and those in which a row has a value."""
        return [
            column
            for index, column in enumerate(self.columns)
            if index == 0 or any(column.of(row) not in (None, "") for row in self.rows)
        ]


def numeric(name: str, *path: str, unit: str = "", form: Callable[[Any], str] = short) -> Column:
    """A column of the number at a key, or at nested keys."""
    return Column(name, lambda row: number(row, *path), unit, form)


def field(name: str, key: str | None = None, *, is_wide: bool = False) -> Column:
    """A column of the text at a key, by default the column's name."""
    return Column(name, lambda row: text(row, key or name), is_wide=is_wide)


CHECK = Column("check", check)


def sort_key(value: Any) -> str | None:
    """The number by which a cell is sorted; None for text."""
    first = value[0] if isinstance(value, tuple) else value
    return f"{first:.6g}" if isinstance(first, int | float) and not isinstance(first, bool) else None


def print_table(console: Console, table: Table) -> None:
    """Prints a table without wide and empty columns; wrong rows are red."""
    columns = [column for column in table.filled() if not column.is_wide]
    chosen = [row for row in table.rows if table.is_brief is None or table.is_brief(row)]
    few = "" if len(chosen) == len(table.rows) else f", {len(chosen)} of {len(table.rows)} rows (table.md has all)"
    shown = RichTable(
        title=f"{table.caption}{few}".translate(PLAIN), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        head = f"{column.name}\n[dim]{column.unit}[/dim]".translate(PLAIN)
        shown.add_column(head, justify="right" if column.is_numeric(table.rows) else "left", no_wrap=True)
    for _, rows in groupby(chosen, table.group or (lambda row: None)):
        shown.add_section()
        for row in rows:
            cells = [column.cell(row).translate(PLAIN).replace("[", r"\[") for column in columns]
            shown.add_row(*cells, style="bold red" if is_bad(row) else None)
    console.print()
    console.print(shown)


def write_markdown(folder: Path, tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Writes ``table.md``: the tables with all columns, and the notes below them."""
    lines: list[str] = []
    for table in tables:
        cells = [[column.name for column in table.columns], ["---"] * len(table.columns)]
        cells += [[column.unit for column in table.columns]]
        cells += [[column.cell(row) for column in table.columns] for row in table.rows]
        lines += [*("| " + " | ".join(line) + " |" for line in cells), ""]
    said = "\n".join([*lines, *(f"- {note}" for note in notes), ""]).translate(PLAIN)
    (folder / "table.md").write_text(said, encoding="utf-8")
