"""HTML and SVG as text: everything that is not ``Markup`` is escaped."""

from __future__ import annotations

import html
import re
from typing import Any

# HTML cannot contain these characters; browsers report them as errors.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

# Elements without an end tag when empty, and how they close: in HTML, and in SVG.
_EMPTY = dict.fromkeys(("meta", "link"), "") | dict.fromkeys(("line", "rect", "path", "circle", "use"), "/")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: Any) -> Markup:
    """Escapes a value, unless it is ``Markup``.

    Example:
        >>> escape("a < b")
        'a &lt; b'
    """
    return value if isinstance(value, Markup) else Markup(html.escape(_CONTROL.sub("\ufffd", str(value))))


def join(*parts: Any) -> Markup:
    """Escapes and concatenates parts; None is left out."""
    return Markup("".join(escape(part) for part in parts if part is not None))


def tag(element: str, /, *children: Any, **attributes: Any) -> Markup:
    """Renders an element; children are escaped, and None is left out.

    ``class_`` and ``aria_label`` stand for ``class`` and ``aria-label``. An attribute that is True has no value; an
    attribute that is None or False is left out.

    Example:
        >>> tag("p", "a < b", class_="note", hidden=True)
        '<p class="note" hidden>a &lt; b</p>'
    """
    written = [element]
    children = tuple(child for child in children if child is not None)
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")  # noqa: PLW2901
        if value is True:
            written.append(key)
        elif value is not None and value is not False:
            written.append(f'{key}="{escape(value)}"')
    if not children and element in _EMPTY:
        return Markup(f"<{' '.join(written)}{_EMPTY[element]}>")
    return join(Markup(f"<{' '.join(written)}>"), *children, Markup(f"</{element}>"))
