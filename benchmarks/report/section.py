"""The results of one experiment as sentences, figures and tables, for the page, the console and ``table.md``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..harness.run import METRICS, Run, holds
from ..harness.tables import PLAIN, Table, print_table, write_markdown
from .figure import Figure, render_figure
from .markup import Markup, join, tag
from .table import render


@dataclass(frozen=True)
class Section:
    """The results of one experiment.

    Attributes:
        sentences: Findings, made from the rows; empty ones are left out.
        parts: None and tables without rows are left out.
        published: The published figures beside ours, if there are any.
        notes: How the numbers were measured and what the columns mean.
    """

    title: str
    sentences: Sequence[str]
    parts: Sequence[Figure | Table | None]
    published: Table | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Leaves out empty parts."""
        object.__setattr__(self, "parts", [part for part in self.parts if getattr(part, "rows", part)])


def show(this: Run, section: Section) -> bool:
    """Prints the tables and sentences of a run and writes them to ``table.md``; returns whether every check holds."""
    tables = [part for part in (*section.parts, section.published) if isinstance(part, Table)]
    notes = [part.note for part in tables if part.note]
    said = list(dict.fromkeys(filter(None, [*section.sentences, *section.notes, *notes])))
    for table in tables:
        print_table(this.console, table)
    for line in said:
        this.console.print(line.translate(PLAIN), style="dim", soft_wrap=True, markup=False)
    write_markdown(this.folder, tables, said)
    this.console.print(f"\nwritten to {this.folder}: table.md, {METRICS}", soft_wrap=True)
    return holds(this.rows)


def render_section(section: Section, name: str, level: int) -> Markup:
    """Renders a section of the page; ``name`` is its id, and the ids of its parts start with it."""
    main_table = next((f"{name}-{index}" for index, part in enumerate(section.parts) if isinstance(part, Table)), None)
    written: list[Markup] = []
    figures: list[Markup] = []
    for index, part in enumerate([*section.parts, None]):
        if isinstance(part, Figure):
            figures.append(render_figure(part, f"{name}-{index}", main_table))
            continue
        if figures:  # neighbouring figures stand side by side where there is room
            written.append(tag("div", *figures, class_="figures"))
            figures = []
        if part is not None:
            written.append(render(part, f"{name}-{index}"))
    written += [tag("p", note, class_="note") for note in section.notes if note]
    if section.published is not None:
        written.append(tag(f"h{level + 1}", "Beside the published figures", id=f"{name}-published-heading"))
        written.append(render(section.published, f"{name}-published"))
    return tag(
        "section",
        tag(f"h{level}", section.title, id=f"{name}-heading"),
        join(*(tag("p", sentence) for sentence in section.sentences if sentence)),
        *written,
        id=name, aria_labelledby=f"{name}-heading",
    )  # fmt: skip
