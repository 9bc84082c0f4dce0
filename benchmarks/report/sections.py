"""The section of each experiment: by benchmark, and apart for each network that it ran on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..harness.values import Row
from ..registry import BENCHMARKS
from . import plain
from .experiment import Experiment
from .section import Section


def section_of(experiment: Experiment, rows: Sequence[Row]) -> Section:
    """Makes the section of an experiment, with the network in its title if it ran in a lab."""
    name = experiment.benchmark
    made = BENCHMARKS[name].section(rows) if is_known(name) else plain.section(name, rows)
    return replace(made, title=f"{made.title}, {experiment.network}") if experiment.network else made


def order_of(experiment: Experiment) -> tuple[float, bool, int]:
    """Its place on the page: labs last, each with its links first; unknown benchmarks after known ones."""
    name, names = experiment.benchmark, list(BENCHMARKS)
    return experiment.link_mbit or 0.0, name != "lab", names.index(name) if is_known(name) else len(names)


def is_known(benchmark: str) -> bool:
    """Whether a benchmark has a section of its own; a suite has none, as its parts have theirs."""
    return benchmark in BENCHMARKS and benchmark != "all"
