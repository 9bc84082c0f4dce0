"""What the page says of each experiment, by the ``benchmark`` of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..section import Section
from ..values import Row
from . import buckets, collectives, compilation, gates, memory, plain, scaling, strategies

_SECTIONS: dict[str, Callable[[Sequence[Row]], Section]] = {
    "main": strategies.main_section,
    "strategies": strategies.strategies_section,
    "gates": gates.section,
    "collectives": collectives.section,
    "buckets": buckets.section,
    "scaling": scaling.section,
    "memory": memory.section,
    "compile": compilation.section,
}


def section_of(benchmark: str, rows: Sequence[Row]) -> Section:
    """Makes the section of an experiment.

    Args:
        benchmark: Its name; one that is not known gets a plain table.
        rows: Its rows.

    Returns:
        The section.
    """
    make = _SECTIONS.get(benchmark)
    return make(rows) if make else plain.section(benchmark, rows)


def order_of(benchmark: str) -> int:
    """Where an experiment stands on the page: those that are not known come last."""
    names = list(_SECTIONS)
    return names.index(benchmark) if is_known(benchmark) else len(names)


def is_known(benchmark: str) -> bool:
    """Whether an experiment has a view of its own."""
    return benchmark in _SECTIONS
