"""Runs as they lie in their folders: rows by benchmark, and the lines that could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..run import METRICS, read_rows
from .values import Row, by, text


@dataclass(frozen=True)
class RunRows:
    """What one run left.

    Attributes:
        name: Of its folder.
        rows: By benchmark, in the order in which they were written.
        broken: File, relative to the folder, and number of each line that holds no JSON object.
    """

    name: str
    rows: dict[str, list[Row]]
    broken: tuple[tuple[str, int], ...] = ()

    @property
    def all_rows(self) -> list[Row]:
        """Of all benchmarks."""
        return [row for rows in self.rows.values() for row in rows]


def read_run(folder: Path) -> RunRows:
    """Reads a run: its rows, and those of its benchmarks' sub-folders if there are any.

    Args:
        folder: Of the run.

    Returns:
        What it holds; a row that does not say of which benchmark it is goes to the one that is called as its folder.

    Raises:
        ValueError: If there is no such folder, or no row in it.
    """
    if not folder.is_dir():
        raise ValueError(f"run (={folder}) must be the folder of a run")
    rows: list[Row] = []
    broken = []
    for path in [folder / METRICS, *sorted(folder.glob(f"*/{METRICS}"))]:
        found, numbers = read_rows(path)
        rows += [{"benchmark": path.parent.resolve().name} | row for row in found]
        broken += [(str(path.relative_to(folder)), number) for number in numbers]
    if not rows:
        raise ValueError(f"run (={folder}) must hold results: there is no row in {METRICS} or */{METRICS}")
    return RunRows(folder.resolve().name, by(rows, lambda row: text(row, "benchmark")), tuple(broken))


def read_runs(folders: Sequence[Path]) -> list[RunRows]:
    """Reads several runs.

    Args:
        folders: At least one.

    Returns:
        Each of them; those whose folders have one name are told apart by a number.

    Raises:
        ValueError: If one is missing or empty, or named twice.
    """
    places = [folder.resolve() for folder in folders]
    for place, folder in zip(places, folders, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"run (={folder}) must be named once")
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else RunRows(f"{run.name} ({index})", run.rows, run.broken)
        for index, run in enumerate(runs, 1)
    ]
