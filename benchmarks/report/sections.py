"""The section of each experiment: that of its benchmark or, for an unknown benchmark, its rows as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..harness.tables import CHECK, Column, Table
from ..harness.values import NONE, Row, number, text
from ..registry import BENCHMARKS
from .environment import ENVELOPE
from .runs import Experiment
from .section import Section
from .sentences import extremes, left_out

_MOST_COLUMNS = 24


def section_of(experiment: Experiment, rows: Sequence[Row]) -> Section:
    """Makes the section of an experiment; its title names the lab or the hosts of a job."""
    name = experiment.benchmark
    made = BENCHMARKS[name].section(rows) if is_known(name) else rows_as_they_are(name, rows)
    return replace(made, title=f"{made.title}, {experiment.network}") if experiment.network else made


def order_of(experiment: Experiment) -> tuple[float, bool, int]:
    """Sorts experiments: labs last, each with its links first; unknown benchmarks after known ones."""
    name, names = experiment.benchmark, list(BENCHMARKS)
    return experiment.link_mbit or 0.0, name != "lab", names.index(name) if is_known(name) else len(names)


def is_known(benchmark: str) -> bool:
    """Whether a benchmark has a section of its own; ``all`` has none, because its parts have theirs."""
    return benchmark in BENCHMARKS and benchmark != "all"


def rows_as_they_are(benchmark: str, rows: Sequence[Row]) -> Section:
    """Makes a table of the fields that are not in every benchmark's rows."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in ENVELOPE and key != "check"))
    columns = [Column("part", lambda row: text(row, "part") or NONE)]
    columns += [Column(key, partial(_value, key=key)) for key in keys[:_MOST_COLUMNS]]
    note = f"no room for {', '.join(keys[_MOST_COLUMNS:])}" if len(keys) > _MOST_COLUMNS else ""
    table = Table(f"Rows of {benchmark or 'no benchmark'}", (*columns, CHECK), rows, note)
    sentence = extremes(rows, lambda row: text(row, "part"), "time")
    sentences = [sentence[:1].upper() + sentence[1:], *(text(row, "line") for row in rows), left_out(rows)]
    return Section(benchmark or "no name", [one for one in sentences if one], [table])


def _value(row: Row, key: str) -> Any:
    value = row.get(key)
    return value if value is None or isinstance(value, str) or number(row, key) is not None else json.dumps(value)
