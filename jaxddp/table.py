"""The tables of the commands, as plain text."""

import shutil
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

_SHORT = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "collective-permute": "CP"}
_WIDTH_ELSEWHERE = 160  # of files and pipes


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str] = ()) -> str:
    r"""Aligns cells below their heads; a table wider than the terminal has a line for each head instead.

    A head's unit stands below it, after a newline. The first column and those in ``left`` are aligned to the left.

    Example:
        >>> print(table(("strategy", "step\nms"), [("naive", "12.5"), ("bucketed", "9.9")]))
        strategy  step
                    ms
        naive     12.5
        bucketed   9.9
    """
    parts = [head.partition("\n") for head in heads]
    lines = [*(line for line in ([part[0] for part in parts], [part[2] for part in parts]) if any(line)), *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    if sum(widths) + 2 * (len(widths) - 1) > terminal_width() and len(heads) > len(rows) + 1:
        names = [head.replace("\n", " ").strip() for head in heads]
        turned = [[name, *cells] for name, *cells in zip(names[1:], *(row[1:] for row in rows), strict=True)]
        return table(["", *(row[0] for row in rows)], turned)
    aligned_left = [place == 0 or head.partition("\n")[0] in left for place, head in enumerate(heads)]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if is_left else f"{cell:>{width}}"
            for cell, width, is_left in zip(line, widths, aligned_left, strict=True)
        ).rstrip()
        for line in lines
    )


def paragraph(text: str) -> str:
    """Wraps a text to the width of the terminal."""
    return textwrap.fill(text, terminal_width(), break_long_words=False, break_on_hyphens=False)


def count_kinds(collectives: Iterable[tuple[str, int]], names: Mapping[str, str] = _SHORT) -> str:
    """Counts collectives by kind, such as ``2 AR + 1 AG``; a kind without a name by itself."""
    counts = Counter(kind for kind, _ in collectives)
    return " + ".join(f"{count:,} {names.get(kind, kind)}" for kind, count in counts.items()) or "none"


def terminal_width() -> int:
    """Columns of the terminal, or of a file."""
    return shutil.get_terminal_size((_WIDTH_ELSEWHERE, 24)).columns
