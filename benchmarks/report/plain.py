"""A benchmark that this page has no view of: its rows, as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..harness.tables import CHECK, Column, Table
from ..harness.values import NONE, Row, number, text
from .environment import ENVELOPE
from .section import Section
from .sentences import extremes, left_out

_MOST_COLUMNS = 24


def section(benchmark: str, rows: Sequence[Row]) -> Section:
    """Makes the section of a benchmark: a table of the columns that its rows alone have."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in ENVELOPE and key != "check"))
    columns = [Column("part", lambda row: text(row, "part") or NONE)]
    columns += [Column(key, partial(_value, key=key)) for key in keys[:_MOST_COLUMNS]]
    note = f"left out for want of room: {', '.join(keys[_MOST_COLUMNS:])}" if len(keys) > _MOST_COLUMNS else ""
    table = Table(f"Rows of {benchmark or 'no benchmark'}", (*columns, CHECK), rows, note)
    sentence = extremes(rows, lambda row: text(row, "part"), "time")
    said = [sentence[:1].upper() + sentence[1:], *(text(row, "line") for row in rows), left_out(rows)]
    return Section(benchmark or "no name", [one for one in said if one], [table])


def _value(row: Row, key: str) -> Any:
    value = row.get(key)
    return value if value is None or isinstance(value, str) or number(row, key) is not None else json.dumps(value)
