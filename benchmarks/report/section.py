"""A section of the page: what an experiment says, as sentences, figures and tables; how they look is no part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .figure import Figure, render_figure
from .markup import Markup, join, tag
from .table import Table, render


@dataclass(frozen=True)
class Section:
    """What is said of one experiment.

    Attributes:
        title: Its heading.
        sentences: What its numbers say; empty ones are left out.
        parts: Figures and tables, in order.
        source: The source's own figures beside ours, if it has any of this experiment.
    """

    title: str
    sentences: Sequence[str]
    parts: Sequence[Figure | Table]
    source: Table | None = None


def render_section(section: Section, name: str, level: int) -> Markup:
    """Writes a section.

    Args:
        section: What to write.
        name: Its id, of its own within the page; those of its parts start with it.
        level: Of its heading.

    Returns:
        The section.
    """
    main_table = next((f"{name}-{index}" for index, part in enumerate(section.parts) if isinstance(part, Table)), None)
    written: list[Markup] = []
    figures: list[Markup] = []
    for index, part in enumerate([*section.parts, None]):
        if isinstance(part, Figure):
            figures.append(render_figure(part, f"{name}-{index}", main_table))
            continue
        if figures:  # those that follow each other stand beside each other where there is room
            written.append(tag("div", *figures, class_="figures"))
            figures = []
        if part is not None:
            written.append(render(part, f"{name}-{index}"))
    if section.source is not None:
        written.append(tag(f"h{level + 1}", "Beside the source's figures", id=f"{name}-source-heading"))
        written.append(render(section.source, f"{name}-source"))
    return tag(
        "section",
        tag(f"h{level}", section.title, id=f"{name}-heading"),
        join(*(tag("p", sentence) for sentence in section.sentences if sentence)),
        *written,
        id=name, aria_labelledby=f"{name}-heading",
    )  # fmt: skip
