"""HTML and SVG as text: what comes from files is escaped, and what is escaped is known by its type."""

from __future__ import annotations

import html
import re
from typing import Any

# HTML has no way to write these, and a browser says so in its console.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

# What may have nothing within it, and how it ends then: in HTML, and in SVG.
_EMPTY = dict.fromkeys(("meta", "link"), "") | dict.fromkeys(("line", "rect", "path", "circle", "use"), "/")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: Any) -> Markup:
    """Escapes what is no ``Markup`` yet.

    Example:
        >>> escape("a < b")
        'a &lt; b'
    """
    return value if isinstance(value, Markup) else Markup(html.escape(_CONTROL.sub("\ufffd", str(value))))


def join(*parts: Any) -> Markup:
    """Escapes parts and sets them behind each other; None is left out."""
    return Markup("".join(escape(part) for part in parts if part is not None))


def tag(element: str, /, *children: Any, **attributes: Any) -> Markup:
    """Writes an element.

    Args:
        element: Its name.
        *children: Escaped where they are no ``Markup``; None is left out.
        **attributes: Escaped; ``class_`` and ``aria_label`` stand for ``class`` and ``aria-label``. True is an
            attribute without a value; None and False leave it out.

    Returns:
        The element; without an end tag where there is nothing in it and it needs none.

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
