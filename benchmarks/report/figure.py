"""Figures: an SVG drawing, its legend, and a description for screen readers.

Horizontal positions are percentages and heights are pixels, so a narrow page narrows the drawing but not its text.
Colours are defined in the page's style sheet, for light and dark. Each style also has its own pattern, marker or dash.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..harness.tables import Table
from .axis import Axis
from .markup import Markup, join, tag
from .table import render

NUM_STYLES = 6
TICK_ROOM = 40  # pixels below a drawing for the ticks of its axis and what they mean

# Hatch lines by style; style 0 has none.
_PATTERNS = {1: "M-1 7L7 -1M5 9L9 5", 2: "M1 2h2M5 6h2", 3: "M-1 1L7 9M3 -3L11 5", 4: "M4 0V8", 5: "M0 4H8M4 0V8"}
# Marker outlines by style, at most 5 pixels from the centre.
_MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "M-3.5 -3.5H3.5V3.5H-3.5Z", "M0 -5L5 4H-5Z", "M0 -5L4.5 0L0 5L-4.5 0Z",
    "M0 5L5 -4H-5Z", "M-1.5 -5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5V-1.5H-1.5Z",
)  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """SVG of a height in pixels; ``is_wide`` if it has no axis at the left and takes the full width."""

    body: Markup
    height: int
    is_wide: bool = False


@dataclass(frozen=True)
class Key:
    """A legend entry: an area of a style, or a line of it, which may be dashed."""

    name: str
    style: int
    is_line: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        description: What it shows, in words.
        legend: What its styles mean.
        table: Its numbers, if no table of its section has them.
    """

    title: str
    description: str
    drawing: Drawing
    legend: tuple[Key, ...] = ()
    table: Table | None = None


def along(share: float) -> str:
    """Formats a share of the width."""
    return f"{100 * share:.2f}%"


def area(style: int) -> str:
    """The class of a filled area."""
    return f"a{style % NUM_STYLES}"


def stroke(style: int, is_dashed: bool = False) -> str:
    """The class of a line."""
    return f"l{style % NUM_STYLES}{' dashed' if is_dashed else ''}"


def colored(style: int) -> str:
    """The class of a shape with the style's colour and no pattern."""
    return f"k{style % NUM_STYLES}"


def marker(style: int, x: float, y: float, name: str | None = None) -> Markup:
    """Draws a marker with a tooltip; x is a share of the width, y pixels."""
    title = tag("title", name) if name is not None else None
    return tag("use", title, href=f"#m{style % NUM_STYLES}", x=along(x), y=f"{y:.1f}")


def line(x1: float, y1: float, x2: float, y2: float, class_: str | None = None) -> Markup:
    """Draws a line; x are shares of the width, y pixels."""
    return tag("line", x1=along(x1), y1=f"{y1:.1f}", x2=along(x2), y2=f"{y2:.1f}", class_=class_)


def words(content: str, x: float, y: float, class_: str, dx: float = 0) -> Markup:
    """Draws text; x is a share of the width, y the base line in pixels."""
    return tag("text", content, x=along(x), y=f"{y:.1f}", dx=dx or None, class_=class_)


def axis_along(axis: Axis, top: float, bottom: float, meaning: str) -> Markup:
    """Draws a horizontal axis, with grid lines from its ticks to the top."""
    return join(
        *(line(axis.at(tick), top, axis.at(tick), bottom, "grid") for tick in axis.ticks),
        *(words(axis.form(tick), axis.at(tick), bottom + 16, "tick middle") for tick in axis.ticks),
        words(meaning, 0.5, bottom + 34, "tick middle"),
    )


def definitions() -> Markup:
    """The patterns and markers that all drawings of a page share."""
    fills = [
        tag(
            "pattern", tag("rect", width=8, height=8, class_=colored(style)),
            tag("path", d=_PATTERNS[style], class_="over") if style in _PATTERNS else None,
            id=f"p{style}", width=8, height=8, patternUnits="userSpaceOnUse",
        )
        for style in range(NUM_STYLES)
    ]  # fmt: skip
    shapes = [tag("path", d=shape, id=f"m{style}") for style, shape in enumerate(_MARKERS)]
    return tag("svg", tag("defs", *fills, *shapes), width=0, height=0, aria_hidden="true", class_="definitions")


def render_figure(figure: Figure, name: str, table: str | None) -> Markup:
    """Renders a figure; ``table`` is the id of the table with its numbers, unless it has its own."""
    title, description = f"{name}-title", f"{name}-text"
    svg = tag(
        "svg",
        tag("title", figure.title, id=title),
        tag("desc", figure.description, id=description),
        figure.drawing.body,
        role="img", aria_labelledby=f"{title} {description}", height=figure.drawing.height, width="100%",
    )  # fmt: skip
    numbers: Markup | None = None
    if figure.table is not None:
        numbers = tag("details", tag("summary", "The numbers of this plot"), render(figure.table, f"{name}-table"))
    elif table is not None:
        numbers = tag("p", tag("a", "The numbers of this plot", href=f"#{table}"), class_="numbers")
    legend = [tag("li", _swatch(key), key.name) for key in figure.legend]
    return tag(
        "figure",
        tag("figcaption", figure.title),
        tag("ul", *legend, class_="legend") if legend else None,
        tag("div", svg, class_="plot wide" if figure.drawing.is_wide else "plot"),
        numbers,
        id=name,
    )


def _swatch(key: Key) -> Markup:
    if key.is_line:
        strokes = line(0, 7, 1, 7, stroke(key.style, key.is_dashed))
        body = join(strokes, tag("g", marker(key.style, 0.5, 7), class_=colored(key.style)))
    else:
        body = tag("rect", width="100%", height=14, class_=area(key.style))
    return tag("svg", body, width=26, height=14, aria_hidden="true")
