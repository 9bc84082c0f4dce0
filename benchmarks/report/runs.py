"""Runs as they lie in their folders: rows by experiment, and the lines that could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..harness.run import METRICS, read_rows
from ..harness.values import Row, by
from .experiment import Experiment, experiment_of

# Not every folder within a folder: that would make one run of all those that lie beside each other.
_FILES = (METRICS, f"*/{METRICS}", f"lab/*/{METRICS}")


@dataclass(frozen=True)
class RunRows:
    """What one run left.

    Attributes:
        name: Of its folder.
        rows: Of all its benchmarks, in the order in which they were written.
        broken: File, relative to the folder, and number of each line that holds no JSON object.
    """

    name: str
    rows: Sequence[Row]
    broken: tuple[tuple[str, int], ...] = ()

    @property
    def experiments(self) -> dict[Experiment, list[Row]]:
        """The rows of each experiment."""
        return by(self.rows, experiment_of)


def read_run(folder: Path) -> RunRows:
    """Reads a run: its rows, and those of its benchmarks' folders if there are any; a lab has folders in its own.

    Returns:
        What it holds; a row that does not say of which benchmark it is goes to the one that is called as its folder.

    Raises:
        ValueError: If there is no such folder, or no row in it.
    """
    if not folder.is_dir():
        raise ValueError(f"run (={folder}) must be the folder of a run")
    rows: list[Row] = []
    broken = []
    for path in [one for pattern in _FILES for one in sorted(folder.glob(pattern))]:
        found, numbers = read_rows(path)
        rows += [{"benchmark": path.parent.resolve().name} | row for row in found]
        broken += [(str(path.relative_to(folder)), number) for number in numbers]
    if not rows:
        raise ValueError(f"run (={folder}) must hold results: there is no row in {' or '.join(_FILES)}")
    return RunRows(folder.resolve().name, rows, tuple(broken))


def read_runs(folders: Sequence[Path]) -> list[RunRows]:
    """Reads several runs; those whose folders have one name are told apart by a number.

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
