"""Reads the rows of runs from their folders, and groups them by experiment: a benchmark on a network.

A benchmark runs over the machine's own memory, inside a lab over links of a given rate, or on the hosts of a job. Rows
of different networks share no section, no figure and no table, and are never compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..harness.run import METRICS, read_rows
from ..harness.values import Row, by, number, text

# Not every subfolder: a folder of several runs must not be read as one run.
_FILES = (METRICS, f"*/{METRICS}", f"lab/*/{METRICS}")


class Experiment(NamedTuple):
    """A benchmark on a network.

    Attributes:
        link_mbit: Rate of a lab's links in Mbit/s; None outside of a lab.
        job_hosts: The hosts of a job in words; empty outside of a job.
    """

    benchmark: str
    link_mbit: float | None = None
    job_hosts: str = ""

    @property
    def rate(self) -> str:
        """The rate of a lab's links in words; empty outside of a lab."""
        return "" if self.link_mbit is None else f"{self.link_mbit:.12g} Mbit/s"

    @property
    def network(self) -> str:
        """The lab or job in words; empty outside of both."""
        return f"in a lab with links of {self.rate}" if self.rate else self.job_hosts and f"on {self.job_hosts}"

    @property
    def label(self) -> str:
        """Its name, with the rate of a lab's links or the hosts of a job.

        Example:
            >>> Experiment("buckets").label, Experiment("buckets", 1000.0).label
            ('buckets', 'buckets at 1000 Mbit/s')
            >>> Experiment("buckets", job_hosts="2 hosts").label
            'buckets on 2 hosts'
        """
        if self.job_hosts:
            return f"{self.benchmark} on {self.job_hosts}"
        return f"{self.benchmark} at {self.rate}" if self.rate else self.benchmark

    @property
    def id(self) -> str:
        """Its name for an address.

        Example:
            >>> Experiment("buckets", 12.5).id
            'buckets-12.5-mbit'
        """
        if self.job_hosts:
            return f"{self.benchmark}-{self.job_hosts.replace(' ', '-')}"
        return self.benchmark if self.link_mbit is None else f"{self.benchmark}-{self.link_mbit:.12g}-mbit"


def experiment_of(row: Row) -> Experiment:
    """The experiment that a row belongs to."""
    return Experiment(text(row, "benchmark"), number(row, "link_mbit"), text(row, "job_hosts"))


@dataclass(frozen=True)
class RunRows:
    """The rows of one run.

    Attributes:
        name: Name of its folder.
        rows: Rows of all its benchmarks, in the order in which they were written.
        broken: File, relative to the folder, and line number of each line that is no JSON object.
    """

    name: str
    rows: Sequence[Row]
    broken: tuple[tuple[str, int], ...] = ()

    @property
    def experiments(self) -> dict[Experiment, list[Row]]:
        """The rows of each experiment."""
        return by(self.rows, experiment_of)


def read_run(folder: Path) -> RunRows:
    """Reads a run's rows, from its folder and those of its benchmarks and lab.

    A row without a benchmark gets the name of its folder.

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
    """Reads several runs; those whose folders have the same name are numbered.

    Raises:
        ValueError: If a run is missing or empty, or named twice.
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
