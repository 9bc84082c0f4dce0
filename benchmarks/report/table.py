"""Tables as HTML; the page's script sorts them by the values behind the text."""

from __future__ import annotations

from ..harness.tables import CHECK, Column, Table, sort_key
from ..harness.values import Row, badge, is_bad, is_not_run
from .markup import Markup, join, tag

_LINE = 36  # characters that stay on one line of a cell
_TALL = 24  # rows, above which a table scrolls in both directions


def render(table: Table, name: str) -> Markup:
    """Renders a table, with the id ``name``, in a box that scrolls, and its note; empty columns are left out."""
    columns = table.filled()
    is_number = [column.is_numeric(table.rows) for column in columns]
    heads = [
        tag(
            "th", tag("span", column.name, class_="name"),
            tag("span", f" {column.unit}", class_="unit") if column.unit else None,
            scope="col", class_="number" if right else None,
        )
        for column, right in zip(columns, is_number, strict=True)
    ]  # fmt: skip
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
    """The first cell of a row, with a badge if the row is wrong or was not run."""
    written = tag("span", f" {badge(row)}", class_="badge") if badge(row) else None
    return tag("th", column.cell(row), written, scope="row", data_value=sort_key(column.of(row)))


def _cell(column: Column, row: Row, is_number: bool) -> Markup:
    shown, key = column.cell(row), sort_key(column.of(row))
    if key is not None:
        return tag("td", shown, data_value=key)  # numbers are aligned by this attribute
    if column is CHECK and is_bad(row):
        shown = f"\N{BALLOT X} {shown}"
    return tag("td", shown, class_="number" if is_number else "long" if len(shown) > _LINE else None)
