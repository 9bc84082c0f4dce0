"""Tables and pages: one description of the columns gives the text of the console and of ``table.md``, and the page.

A row that failed or is wrong is marked: its numbers end in ``!``, the page shows it in red, and plots leave it out.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxddp.table import count_kinds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .benchmark import Benchmark

Row = Mapping[str, Any]
PAGE, TABLES = "report.html", "table.md"
MIB = 2**20
NONE = "-"
# What every run says about where it was made; values that differ between rows are joined.
_ENVIRONMENT = (
    "command", "commit", "measured_at", "system", "machine", "cores", "gpus", "driver", "python", "versions",
    "link_mbit", "launcher", "variables",
)  # fmt: skip
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 96rem; padding: 0 1rem; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
.table { overflow-x: auto; } table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { font-size: 13px; padding: .2rem .4rem; text-align: left; white-space: nowrap; border-bottom: 1px solid #8884; }
.number { text-align: right; font-variant-numeric: tabular-nums; } th small { font-weight: normal; }
tr.bad td { background: #d0302026; font-weight: 600; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; overflow-wrap: anywhere; }
"""


def is_bad(row: Row) -> bool:
    """Whether a row failed, is wrong or missed its limit."""
    return str(row.get("check")).startswith(("FAILED", "WRONG", "MISSED"))


def is_sound(row: Row) -> bool:
    """Whether a row was measured, and nothing is wrong with it."""
    return not is_bad(row) and not str(row.get("check")).startswith("not run")


def short(value: float) -> str:
    """Formats a number with three significant digits, or with all digits before the point.

    Example:
        >>> short(0.01234), short(12.34), short(1234.5), short(0)
        ('0.0123', '12.3', '1,234', '0')
    """
    if isinstance(value, int) or value == 0 or not math.isfinite(value):
        return f"{value:,.0f}"
    return f"{value:,.{min(max(2 - math.floor(math.log10(abs(value))), 0), 9)}f}"


def signed(value: float) -> str:
    """As `short`, with a sign."""
    return f"{'+' if value > 0 else ''}{short(value)}"


def percent(share: float) -> str:
    """Formats a share in percent."""
    return f"{share:.0%}" if abs(share) >= 0.0995 or share == 0 else f"{share:.1%}"


def mib(num_bytes: float) -> str:
    """Formats bytes as MiB, without the unit."""
    return f"{num_bytes / MIB:,.2f}"


def size(num_bytes: float) -> str:
    """Formats bytes in the largest unit that gives at least 1.

    Example:
        >>> size(4096), size(25 * 2**20), size(2**30)
        ('4 KiB', '25 MiB', '1 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def counts(collectives: Sequence[Sequence[Any]]) -> str:
    """The number of collectives of each kind."""
    return count_kinds(sorted((kind, num_bytes) for kind, num_bytes in collectives))


@dataclass(frozen=True)
class Column:
    """A column of a table: ``of`` is the key of a row's value or a function of the row, ``form`` formats numbers."""

    name: str
    of: str | Callable[[Row], Any] = ""
    unit: str = ""
    form: Callable[[Any], str] = short

    def value(self, row: Row) -> Any:
        """A row's value, None if it has none."""
        return row.get(self.of or self.name) if isinstance(self.of, str) else self.of(row)

    def cell(self, row: Row) -> str:
        """The text that a row shows."""
        value = self.value(row)
        if value is None or value == "":
            return NONE
        return value if isinstance(value, str) else self.form(value) + "!" * is_bad(row)


def interval(name: str, low: str, high: str, unit: str = "", form: Callable[[float], str] = short) -> Column:
    """A column of two numbers."""

    def of(row: Row) -> Any:
        return None if row.get(low) is None or row.get(high) is None else (row[low], row[high])

    return Column(name, of, unit, lambda both: " to ".join(map(form, both)))


CHECK = Column("check")
STEP = (Column("step", "median_ms", "ms"), interval("p10 to p90", "p10_ms", "p90_ms", "ms"))


def tables_of(benchmark: Benchmark, rows: Sequence[Row]) -> Iterable[tuple[str, list[Column], list[Row]]]:
    """The tables that have rows, each with the columns in which a row has a value."""
    first = next(iter(benchmark.columns))
    for title, columns in benchmark.columns.items():
        if shown := [row for row in rows if (row.get("table") or first) == title]:
            yield title, [one for one in columns if any(one.value(row) not in (None, "") for row in shown)], shown


def as_text(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """A table of Markdown, with columns of even width."""
    padded = []
    for column in columns:
        cells = [column.name + (f" ({column.unit})" if column.unit else "")]
        cells += [column.cell(row).replace("|", "/") for row in rows]
        width, side = max(map(len, cells)), ">" if _is_numeric(column, rows) else "<"
        cells.insert(1, "-" * width)
        padded.append([f"{cell:{side}{width}}" for cell in cells])
    return "\n".join([f"**{title}**", "", *(f"| {' | '.join(line)} |" for line in zip(*padded, strict=True)), ""])


def write(folder: Path, benchmark: Benchmark, rows: Sequence[Row]) -> str:
    """Writes ``table.md`` and the page of a run, and returns what the console shows."""
    tables = list(tables_of(benchmark, rows))
    notes = list(dict.fromkeys([*benchmark.notes, *(note for row in rows for note in row.get("notes") or ())]))
    texts = [*(as_text(*table) for table in tables), "\n".join(f"- {note}" for note in notes)]
    title = f"{benchmark.name}: {benchmark.summary}"
    (folder / TABLES).write_text("\n".join([f"# {title}", "", *texts, ""]), "utf-8")
    sound = [row for row in rows if is_sound(row)]
    figures = [_svg(figure) for figure in benchmark.plot(sound)] if sound else []
    parts = "".join([*figures, *(_as_html(*table) for table in tables)])
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    facts = "".join(f"<dt>{name}</dt><dd>{escape(said)}</dd>" for name, said in _environment(rows))
    (folder / PAGE).write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>{parts}"
        f"<h2>Notes</h2><ul>{listed}</ul><h2>Where it was measured</h2><dl>{facts}</dl></html>\n",
        "utf-8",
    )
    return "\n".join(["", *texts, "", f"written to {folder}: {TABLES}, {PAGE}, metrics.jsonl"])


def _environment(rows: Sequence[Row]) -> Iterable[tuple[str, str]]:
    for name in _ENVIRONMENT:
        said = [one if isinstance(one := row[name], str) else json.dumps(one) for row in rows if row.get(name)]
        if said:
            yield name.replace("_", " "), "; ".join(dict.fromkeys(said[:1] if name == "measured_at" else said))


def _is_numeric(column: Column, rows: Sequence[Row]) -> bool:
    return any(isinstance(column.value(row), int | float | tuple) for row in rows)


def _as_html(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> str:
    shown = [('class="number"' if _is_numeric(column, rows) else "", column) for column in columns]
    heads = (f"<th {kind}>{escape(one.name)}<br><small>{escape(one.unit)}</small></th>" for kind, one in shown)
    lines = ["<tr>", *heads]
    for row in rows:
        lines.append('</tr><tr class="bad">' if is_bad(row) else "</tr><tr>")
        lines += [f"<td {kind}>{escape(one.cell(row))}</td>" for kind, one in shown]
    return f'<div class="table"><table><caption>{escape(title)}</caption>{"".join(lines)}</tr></table></div>'


def _svg(figure: Figure) -> str:
    """A figure as inline SVG, which scales and needs no other file."""
    from matplotlib import rc_context  # here, because every rank imports this module

    title = escape(figure.get_suptitle(), quote=True)
    file = io.StringIO()
    with rc_context({"svg.hashsalt": title}):  # the same names of clips in every run, others in every figure
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawing = file.getvalue()
    return f'<figure role="img" aria-label="{title}">{drawing[drawing.index("<svg") :]}</figure>'


def new_figure(title: str, num_rows: int = 1, num_columns: int = 1, *, height: float = 3.2) -> tuple[Figure, Any]:
    """An empty figure of the page's width, and its axes, ``[num_rows][num_columns]``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height * num_rows), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def whiskers(values: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> np.ndarray:
    """Distances to both ends of intervals, as matplotlib wants them; 0 where an interval leaves out its value."""
    return np.maximum([np.subtract(values, lows), np.subtract(highs, values)], 0)


def by(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Groups rows by the values of some keys, in their order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return groups
