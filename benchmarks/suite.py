"""Several benchmarks as one run, each with a folder of its own inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .harness.options import Options
from .harness.run import FAILED, METRICS, NotRun, Run, holds, read_rows
from .harness.tables import CHECK, Table, field, write_markdown
from .registry import BENCHMARKS

Setups = dict[str, tuple[Any, str]]


def describe_each(names: Sequence[str], options: Options) -> Setups:
    """Describes benchmarks; raises ValueError as they do."""
    return {name: BENCHMARKS[name].module.describe(options) for name in names}


def run_each(this: Run, setups: Setups) -> None:
    """Runs benchmarks; each is a row that tells whether all its checks hold."""
    for name, described in setups.items():
        run_one(this, name, partial(run_described, name, described))


def run_described(name: str, described: tuple[Any, str], this: Run) -> bool:
    """Says what a benchmark will do, and runs it."""
    setup, line = described
    this.console.print(f"\n{name}: {line}", soft_wrap=True, markup=False)
    return BENCHMARKS[name].module.run(this, setup)


def run_one(this: Run, name: str, measure: Callable[[Run], bool]) -> None:
    """Runs a benchmark as a part of another."""

    def rows() -> list[dict[str, Any]]:
        folder = this.folder / name
        folder.mkdir(exist_ok=True)
        good = measure(Run(folder, this.console, name))
        if not read_rows(folder / METRICS)[0] and not any(folder.glob(f"*/{METRICS}")):
            raise NotRun("it has nothing to measure here")
        # FAILED, not WRONG, so that a resumed run retries the failed parts in that folder.
        return [{"check": "ok" if good else f"{FAILED}not every check holds, see {name}/"}]

    this.part(name, rows)


def finish(this: Run, notes: Sequence[str]) -> bool:
    """Writes the table of what was run; returns whether every check of each benchmark holds."""
    write_markdown(this.folder, [Table("", (field("benchmark", "part"), CHECK), this.rows)], notes)
    this.console.print(f"\nwritten to {this.folder}: table.md, and a folder for each benchmark", soft_wrap=True)
    return holds(this.rows)
