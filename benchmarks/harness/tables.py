"""Tables of rows: the same columns in the terminal and in ``table.md``, made from rows alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from .run import FAILED

NOTHING = "-"
_BAD = (FAILED, "WRONG", "MISSED")


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: At its top.
        unit: Below that; empty if it has none.
        cell: What a row shows in it.
        is_text: Whether it stands at the left.
    """

    name: str
    unit: str
    cell: Callable[[Mapping[str, Any]], str]
    is_text: bool = False


def value(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    """A cell that formats a field, or shows that the row has none.

    Example:
        >>> cell = value("median_ms", ".0f")
        >>> cell({"median_ms": 12.3}), cell({})
        ('12', '-')
    """
    return lambda row: NOTHING if row.get(key) is None else format(row[key], form)


def milliseconds(number: float, *, sign: str = "") -> str:
    """Writes a time with three digits, or all of those before the point.

    Example:
        >>> milliseconds(1.234), milliseconds(123.4), milliseconds(-12.34, sign="+")
        ('1.23', '123', '-12.3')
    """
    return f"{number:{sign}.{0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2}f}"


def time_cell(*keys: str, sign: str = "") -> Callable[[Mapping[str, Any]], str]:
    """A cell that shows a field in milliseconds, or two as the ends of an interval.

    Example:
        >>> time_cell("p10_ms", "p90_ms")({"p10_ms": 11.82, "p90_ms": 113.1})
        '11.8-113'
    """

    def cell(row: Mapping[str, Any]) -> str:
        if row.get(keys[0]) is None:
            return NOTHING
        return (" to " if sign else "-").join(milliseconds(row[key], sign=sign) for key in keys)

    return cell


def plus_minus_cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    """A cell that shows a time in milliseconds and its standard deviation, ``name_ms`` and ``name_sd_ms``.

    Example:
        >>> plus_minus_cell("predicted")({"predicted_ms": 568.2, "predicted_sd_ms": 4.12})
        '568 +- 4.12'
    """

    def cell(row: Mapping[str, Any]) -> str:
        number, deviation = (row.get(f"{name}_{part}") for part in ("ms", "sd_ms"))
        if number is None:
            return NOTHING
        return milliseconds(number) if deviation is None else f"{milliseconds(number)} +- {milliseconds(deviation)}"

    return cell


def terminal_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str, *, has_groups: bool = True
) -> Table:
    """Lays rows out for a terminal.

    Args:
        rows: Of the table.
        columns: Of the table.
        title: Above it.
        has_groups: Whether rows with the same first column belong together, and others are set apart.

    Returns:
        The table.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify = "left" if column.is_text else "right"
        table.add_column(f"{column.name}\n[dim]{column.unit}[/dim]", justify=justify, no_wrap=True)  # type: ignore[arg-type]
    previous = None
    for row in rows:
        cells = [column.cell(row).replace("[", r"\[") for column in columns]
        if has_groups and previous not in (None, cells[0]):
            table.add_section()
        previous = cells[0]
        table.add_row(*cells, style="bold red" if str(row["check"]).startswith(_BAD) else None)
    return table


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[str]:
    """Lays rows out in lines of Markdown."""
    lines = [[column.name for column in columns], ["---"] * len(columns), [column.unit for column in columns]]
    lines += [[column.cell(row) for column in columns] for row in rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def write_markdown(folder: Path, tables: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    """Writes ``table.md``: tables, and notes below them."""
    lines = [line for table in tables for line in [*table, ""]]
    (folder / "table.md").write_text("\n".join([*lines, *(f"- {note}" for note in notes), ""]))
