"""Two runs side by side: the same thing measured before and after, or on one machine and on another.

Rows are of the same thing if all that says what was measured is the same. A difference counts where each median lies
outside the other's 10th to 90th percentile; a ratio of a gate has its 95 % interval for that, and bytes have no spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .axis import logarithmic
from .bars import Bar, draw_bars
from .environment import differences
from .figure import Figure
from .runs import RunRows
from .section import Section
from .sentences import is_apart
from .steps import in_words
from .table import Column, Table, field, numeric
from .values import Row, buffer_bytes, by, counted, is_sound, listed, mark, number, span, text

KEY = (
    "benchmark", "framework", "backend", "num_ranks", "strategy", "collective", "bucket_mb", "size_bytes",
    # What tells rows apart that have none of these, or all of them alike.
    "mode", "how", "model", "target", "moment", "name",
)  # fmt: skip
SAME, NOT_COMPARED = "no difference seen", "not compared"
_MOST_BARS = 40
_WORDS = {"ms": ("faster", "slower"), "MiB": ("less", "more"), "": ("lower", "higher")}


class Quantity(NamedTuple):
    """What a row measured, with its spread, and its unit."""

    value: float
    low: float
    high: float
    unit: str


def quantity_of(row: Row) -> Quantity | None:
    """What a row measured: a time, a ratio, or what a device holds; None if it is none of them."""
    median = number(row, "median_ms")
    if median is not None:
        return Quantity(median, number(row, "p10_ms") or median, number(row, "p90_ms") or median, "ms")
    ratio, low, high = (number(row, key) for key in ("ratio", "low", "high"))
    if ratio is not None and low is not None and high is not None:
        return Quantity(ratio, low, high, "")
    held = row.get("compiled")
    if isinstance(held, dict):
        total = sum(number(held, key) or 0 for key in held) / 2**20
        return Quantity(total, total, total, "MiB")
    return None


def compare(first: RunRows, second: RunRows) -> Section:
    """Compares two runs.

    Args:
        first: What the other is compared with.
        second: The other.

    Returns:
        A section: how many differ and which, a figure of the ratios, and the table of all of them.
    """
    ours, theirs = _by_key(first), _by_key(second)
    shared = [key for key in ours if key in theirs]
    lines = [_line(ours[key], theirs[key]) for key in shared]
    alone = [(len(ours) - len(shared), first.name), (len(theirs) - len(shared), second.name)]
    table = Table(
        f"{first.name} and {second.name}",
        (
            field("benchmark"),
            Column("what", in_words),
            Column(first.name, lambda row: _value(row["first"])),
            Column("spread", lambda row: _spread(row["first"])),
            Column(second.name, lambda row: _value(row["second"])),
            Column("spread", lambda row: _spread(row["second"])),
            Column("unit", lambda row: text(row, "unit")),
            numeric("ratio", "ratio", unit="second / first", form=lambda value: f"{value:.3f}"),
            Column("seen", lambda row: text(row, "seen")),
        ),
        lines,
        "spread: p10\N{EN DASH}p90, of ratios the 95 % interval; faster or slower where each median lies outside the"
        f" other's spread, else {SAME}",
    )
    figure = _figure(first, second, lines)
    return Section(
        f"{second.name} compared with {first.name}",
        [sentence for sentence in _sentences(first, second, lines, alone) if sentence],
        [figure, table] if figure else [table],
    )


def key_of(row: Row) -> tuple[str, ...]:
    """What a row is about; rows with the same are compared."""
    return tuple(str(buffer_bytes(row) if key == "size_bytes" else row.get(key)) for key in KEY)


def _by_key(run: RunRows) -> dict[tuple[str, ...], Row]:
    """Rows that measured something or failed at it, by what they are about; two of one thing are neither's."""
    rows = [row for row in run.all_rows if quantity_of(row) or ("strategy" in row and not is_sound(row))]
    groups = by(rows, key_of)
    return {key: some[0] for key, some in groups.items() if len(some) == 1}


def _line(first: Row, second: Row) -> dict[str, Any]:
    one, other = quantity_of(first), quantity_of(second)
    line = {key: first[key] for key in KEY if key in first} | {"check": ""}
    unsound = list(dict.fromkeys(filter(None, [_unsound(first), _unsound(second)])))
    if unsound or one is None or other is None or one.value <= 0:
        return line | {"first": first, "second": second, "seen": f"{NOT_COMPARED}: {listed(unsound) or 'no number'}"}
    seen = SAME
    if is_apart(_timed(one), _timed(other)):
        seen = _WORDS[one.unit][other.value > one.value]
    return line | {"first": first, "second": second, "unit": one.unit, "ratio": other.value / one.value, "seen": seen}


def _unsound(row: Row) -> str:
    """What keeps a row from being compared; a gate that was missed was measured all the same."""
    return mark(row).replace("MISSED", "")


def _timed(one: Quantity) -> Row:
    return {"median_ms": one.value, "p10_ms": one.low, "p90_ms": one.high}


def _value(row: Row) -> Any:
    found = quantity_of(row)
    return _unsound(row) if _unsound(row) or found is None else found.value


def _spread(row: Row) -> Any:
    found = quantity_of(row)
    return None if _unsound(row) or found is None or found.low == found.high else span((found.low, found.high))


def _figure(first: RunRows, second: RunRows, lines: Sequence[Row]) -> Figure | None:
    # Bytes that are the same need no picture.
    compared = [
        line
        for line in lines
        if number(line, "ratio") and (line["seen"] != SAME or line["unit"] != "MiB") and _has_positive_ends(line)
    ]
    bars, ends = [], [1.0]
    for line in sorted(compared, key=lambda line: line["seen"] == SAME)[:_MOST_BARS]:
        one, other = quantity_of(line["first"]), quantity_of(line["second"])
        assert one is not None and other is not None
        low_high = (other.low / one.high, other.high / one.low)
        ends += [line["ratio"], *low_high]
        bars.append(
            Bar(
                text(line, "benchmark"),
                in_words(line),
                f"{line['ratio']:.3f} {line['seen']}",
                (),
                low_high,
                line["ratio"],
                1.0,
            )
        )
    if not bars:
        return None
    bars.sort(key=lambda bar: list(first.rows).index(bar.group))
    title = f"{second.name} / {first.name}"
    said = [f"{bar.label}: {bar.note}." for bar in bars]
    meaning = "ratio; whiskers: one's p10 over the other's p90, and the reverse"
    return Figure(title, " ".join(said), draw_bars(bars, logarithmic(ends), meaning))


def _has_positive_ends(line: Row) -> bool:
    return all(
        one is not None and one.low > 0 and one.high > 0
        for one in (quantity_of(line["first"]), quantity_of(line["second"]))
    )


def _sentences(first: RunRows, second: RunRows, lines: Sequence[Row], alone: Sequence[tuple[int, str]]) -> list[str]:
    if not lines:
        return [f"Nothing was measured in both {first.name} and {second.name}."]
    seen = [text(line, "seen").split(":")[0] for line in lines]
    order = [*(word for words in _WORDS.values() for word in words), SAME, NOT_COMPARED]
    counts = [f"{seen.count(word)} {word}" for word in order if word in seen]
    said = [
        f"Of {counted(len(lines), 'thing')} measured in both, {second.name} against {first.name}: {listed(counts)}."
    ]
    differing = [line for line in lines if number(line, "ratio") and line["seen"] != SAME]
    if differing:
        most = max(differing, key=lambda line: max(line["ratio"], 1 / line["ratio"]))
        said.append(f"The largest difference: {in_words(most)}, {most['ratio']:.2f} times, {most['seen']}.")
    apart = differences(first, second)
    said.append(
        f"The runs differ in {'; '.join(apart)}."
        if apart
        else "Their rows say the same of command, code, machine and versions."
    )
    said += [f"{counted(count, 'thing')} in {name} alone." for count, name in alone if count]
    return said
