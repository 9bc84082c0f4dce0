"""What the page says of each experiment: by its benchmark, and apart for each network that it ran on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module

from . import plain
from .experiment import Experiment
from .section import Section
from .values import Row

# Each benchmark's folder says what the page shows of it; loaded when a page needs it, because they use this folder.
_SECTIONS = {
    "lab": "lab.section:section",
    "main": "strategies.section:main_section",
    "strategies": "strategies.section:strategies_section",
    "gates": "gates.section:section",
    "collectives": "collectives.section:section",
    "buckets": "buckets.section:section",
    "scaling": "scaling.section:section",
    "memory": "memory.section:section",
    "compile": "compilation.section:section",
}


def section_of(experiment: Experiment, rows: Sequence[Row]) -> Section:
    """Makes the section of an experiment.

    Args:
        experiment: One whose benchmark is not known gets a plain table.
        rows: Its rows.

    Returns:
        The section, which has a lab in its title if it ran in one.
    """
    made = _maker(experiment.benchmark)(rows)
    return replace(made, title=f"{made.title}, {experiment.network}") if experiment.network else made


def order_of(experiment: Experiment) -> tuple[float, int]:
    """Where an experiment stands on the page: labs below all else, and benchmarks that are not known come last."""
    names = list(_SECTIONS)
    place = names.index(experiment.benchmark) if is_known(experiment.benchmark) else len(names)
    return experiment.link_mbit or 0.0, place


def is_known(benchmark: str) -> bool:
    """Whether a benchmark has a view of its own."""
    return benchmark in _SECTIONS


def _maker(benchmark: str) -> Callable[[Sequence[Row]], Section]:
    if not is_known(benchmark):
        return partial(plain.section, benchmark)
    module, _, function = _SECTIONS[benchmark].partition(":")
    return getattr(import_module(f"benchmarks.{module}"), function)
