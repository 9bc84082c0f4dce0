"""What the page says of each experiment: by its benchmark, and apart for each network that it ran on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..experiment import Experiment
from ..section import Section
from ..values import Row
from . import buckets, collectives, compilation, gates, lab, memory, plain, scaling, strategies

_SECTIONS: dict[str, Callable[[Sequence[Row]], Section]] = {
    "lab": lab.section,
    "main": strategies.main_section,
    "strategies": strategies.strategies_section,
    "gates": gates.section,
    "collectives": collectives.section,
    "buckets": buckets.section,
    "scaling": scaling.section,
    "memory": memory.section,
    "compile": compilation.section,
}


def section_of(experiment: Experiment, rows: Sequence[Row]) -> Section:
    """Makes the section of an experiment.

    Args:
        experiment: One whose benchmark is not known gets a plain table.
        rows: Its rows.

    Returns:
        The section, which has a lab in its title if it ran in one.
    """
    make = _SECTIONS.get(experiment.benchmark)
    made = make(rows) if make else plain.section(experiment.benchmark, rows)
    return replace(made, title=f"{made.title}, {experiment.network}") if experiment.network else made


def order_of(experiment: Experiment) -> tuple[float, int]:
    """Where an experiment stands on the page: labs below all else, and benchmarks that are not known come last."""
    names = list(_SECTIONS)
    place = names.index(experiment.benchmark) if is_known(experiment.benchmark) else len(names)
    return experiment.link_mbit or 0.0, place


def is_known(benchmark: str) -> bool:
    """Whether a benchmark has a view of its own."""
    return benchmark in _SECTIONS
