"""Tables: what they show is said by columns that read rows, and their HTML sorts by the values behind the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .markup import Markup, join, tag
from .values import NONE, Row, badge, check, cut, is_bad, is_not_run, number, short, text

_NUMBER, _LONG = "number", "long"
_LINE = 36  # letters that stay in one line of a cell
_TALL = 24  # rows, above which a table scrolls in both directions


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: Its heading.
        of: What a row has in it: text, a number, a pair of numbers, or None.
        unit: Below the heading.
        form: How a value that is no text is written.
    """

    name: str
    of: Callable[[Row], Any]
    unit: str = ""
    form: Callable[[Any], str] = short

    def cell(self, row: Row) -> str:
        """What a row shows in it."""
        value = self.of(row)
        return NONE if value is None or value == "" else cut(value) if isinstance(value, str) else self.form(value)


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: Its name.
        columns: From left to right; the first one's cells are the headings of their rows, and others are left out that
            no row has anything in.
        rows: From top to bottom.
        note: A sentence below it.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    note: str = ""


def numeric(name: str, *path: str, unit: str = "", form: Callable[[Any], str] = short) -> Column:
    """A column of a number that a row has under a key, or under keys within each other."""
    return Column(name, lambda row: number(row, *path), unit, form)


def field(name: str, key: str | None = None) -> Column:
    """A column of text that a row has under a key."""
    return Column(name, lambda row: text(row, key or name))


def said(row: Row) -> str:
    """What a row says of its own correctness, with a sign before what is bad."""
    return f"\N{BALLOT X} {check(row)}" if is_bad(row) else check(row).strip("-")


CHECK = Column("check", said)


def render(table: Table, name: str) -> Markup:
    """Writes a table in a box of its own, which scrolls where the page is too narrow.

    Args:
        table: What to write.
        name: Its id, of its own within the page.

    Returns:
        The box, and the note below it.
    """
    columns = [
        column
        for index, column in enumerate(table.columns)
        if index == 0 or any(column.of(row) not in (None, "") for row in table.rows)
    ]
    is_number = [any(_sort_key(column.of(row)) is not None for row in table.rows) for column in columns]
    heads = [
        tag(
            "th", tag("span", column.name, class_="name"), _unit(column), scope="col", class_=_NUMBER if right else None
        )
        for column, right in zip(columns, is_number, strict=True)
    ]
    lines = [
        tag(
            "tr",
            _heading(columns[0], row),
            *(_cell(column, row, right) for column, right in zip(columns[1:], is_number[1:], strict=True)),
            class_="bad" if is_bad(row) else "not-run" if is_not_run(row) else None,
        )
        for row in table.rows
    ]
    caption = tag("caption", tag("span", table.caption), id=f"{name}-caption")
    written = tag("table", caption, tag("thead", tag("tr", *heads)), tag("tbody", *lines), class_="sorts")
    kind = "scroll tall" if len(table.rows) > _TALL else "scroll"
    return join(
        tag("div", written, class_=kind, role="region", tabindex="0", id=name, aria_labelledby=f"{name}-caption"),
        tag("p", table.note, class_="note") if table.note else None,
    )


def _heading(column: Column, row: Row) -> Markup:
    """A row's first cell, which says as well what keeps the row from being believed."""
    shown, key = column.cell(row), _sort_key(column.of(row))
    written = tag("span", f" {badge(row)}", class_="badge") if badge(row) else None
    return tag("th", shown, written, scope="row", data_value=key)


def _cell(column: Column, row: Row, is_number: bool) -> Markup:
    shown, key = column.cell(row), _sort_key(column.of(row))
    if key is not None:
        return tag("td", shown, data_value=key)  # its style goes by that
    return tag("td", shown, class_=_NUMBER if is_number else _LONG if len(shown) > _LINE else None)


def _unit(column: Column) -> Markup | None:
    return tag("span", f" {column.unit}", class_="unit") if column.unit else None


def _sort_key(value: Any) -> str | None:
    """What a cell is sorted by, if not by its text."""
    first = value[0] if isinstance(value, tuple) else value
    return f"{first:.6g}" if isinstance(first, int | float) and not isinstance(first, bool) else None
