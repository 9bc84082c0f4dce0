"""Two runs compared: before and after a change, or on two machines.

Rows are compared if they have the same benchmark, network and settings (``KEY``). Two times differ if each median lies
outside the other's 10th to 90th percentile; ratios of gates use their 95 % intervals; bytes have no spread. Each
network has a figure and a table of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..harness.tables import Column, Table, field, numeric
from ..harness.values import Row, buffer_bytes, by, counted, is_sound, listed, mark, number, short, span, text
from .axis import logarithmic
from .bars import Bar, draw_bars
from .environment import differences
from .figure import Figure
from .runs import RunRows, experiment_of
from .section import Section
from .sentences import is_apart, of_group
from .steps import in_words

# Fields that identify a measurement within an experiment.
KEY = (
    "framework", "backend", "num_ranks", "strategy", "collective", "bucket_mb", "size_bytes",
    "mode", "how", "model", "target", "moment", "name",
)  # fmt: skip
_EXPERIMENT = ("benchmark", "link_mbit", "job_hosts")
SAME, NOT_COMPARED = "no difference seen", "not compared"
_MOST_BARS = 40
# By unit: the words for a value below the first run's, and for one above it.
_WORDS = {
    "ms": ("faster", "slower"),
    "Mbit/s": ("slower", "faster"),
    "MiB": ("less", "more"),
    "": ("lower", "higher"),
}


class Quantity(NamedTuple):
    """What a row measured, with its spread and unit."""

    value: float
    low: float
    high: float
    unit: str


def quantity_of(row: Row) -> Quantity | None:
    """What a row measured: a time, a rate, a ratio, or the memory of a device; None otherwise."""
    for key, unit in (("median_ms", "ms"), ("rate_mbit", "Mbit/s")):
        median, end = number(row, key), key.split("_")[1]
        if median is not None:
            return Quantity(median, number(row, f"p10_{end}") or median, number(row, f"p90_{end}") or median, unit)
    ratio, low, high = (number(row, key) for key in ("ratio", "low", "high"))
    if ratio is not None and low is not None and high is not None:
        return Quantity(ratio, low, high, "")
    held = row.get("compiled")
    if isinstance(held, dict):
        total = sum(number(held, key) or 0 for key in held) / 2**20
        return Quantity(total, total, total, "MiB")
    return None


def compare(first: RunRows, second: RunRows) -> Section:
    """Compares a second run with the first.

    For each network there are sentences on how many rows differ and which differ most, a figure of ratios, and a table.
    """
    ours, theirs = _by_key(first), _by_key(second)
    shared = [key for key in ours if key in theirs]
    alone = [(len(ours) - len(shared), first.name), (len(theirs) - len(shared), second.name)]
    said: list[str] = []
    parts: list[Figure | Table] = []
    lines = by([_line(ours[key], theirs[key]) for key in shared], lambda line: experiment_of(line).network)
    for network, some in sorted(lines.items(), key=lambda one: one[0] != ""):
        said += [_of_network(network, sentence) for sentence in _seen(first, second, some)]
        figure = _figure(first, second, network, some)
        parts += [figure] if figure else []
        parts.append(_table(first, second, network, some))
    if lines:
        apart = differences(first, second)
        said.append(
            f"The runs differ in {'; '.join(apart)}."
            if apart
            else "Their rows say the same of command, code, machine and versions."
        )
        said += [f"{counted(count, 'thing')} in {name} alone." for count, name in alone if count]
    else:
        said.append(f"Nothing was measured in both {first.name} and {second.name}.")
    return Section(f"{second.name} compared with {first.name}", said, parts)


def _of_network(network: str, sentence: str) -> str:
    if not network:
        return sentence
    return of_group(f"{network[:1].upper()}{network[1:]}", f"{sentence[:1].lower()}{sentence[1:]}")


def _table(first: RunRows, second: RunRows, network: str, lines: Sequence[Row]) -> Table:
    return Table(
        ", ".join(filter(None, [f"{first.name} and {second.name}", network])),
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


def key_of(row: Row) -> tuple[str, ...]:
    """What identifies a row; rows with equal keys are compared."""
    of = (str(buffer_bytes(row) if key == "size_bytes" else row.get(key)) for key in KEY)
    return (experiment_of(row).label, *of)


def _by_key(run: RunRows) -> dict[tuple[str, ...], Row]:
    """Rows that measured something or failed, by key; keys that occur twice are dropped."""
    rows = [row for row in run.rows if quantity_of(row) or ("strategy" in row and not is_sound(row))]
    groups = by(rows, key_of)
    return {key: some[0] for key, some in groups.items() if len(some) == 1}


def _line(first: Row, second: Row) -> dict[str, Any]:
    one, other = quantity_of(first), quantity_of(second)
    line = {key: first[key] for key in (*_EXPERIMENT, *KEY, "part") if key in first} | {"check": ""}
    unsound = list(dict.fromkeys(filter(None, [_unsound(first), _unsound(second)])))
    if unsound or one is None or other is None or one.value <= 0:
        return line | {"first": first, "second": second, "seen": f"{NOT_COMPARED}: {listed(unsound) or 'no number'}"}
    seen = SAME
    if is_apart(_timed(one), _timed(other)):
        seen = _WORDS[one.unit][other.value > one.value]
    line |= {"first": first, "second": second, "unit": one.unit, "ratio": other.value / one.value, "seen": seen}
    has_ends = min(one.low, one.high, other.low, other.high) > 0
    return line | ({"low": other.low / one.high, "high": other.high / one.low} if has_ends else {})


def _unsound(row: Row) -> str:
    """Why a row cannot be compared; empty if it can, as a missed gate can."""
    return mark(row).replace("MISSED", "")


def _timed(one: Quantity) -> Row:
    return {"median_ms": one.value, "p10_ms": one.low, "p90_ms": one.high}


def _value(row: Row) -> Any:
    found = quantity_of(row)
    return _unsound(row) if _unsound(row) or found is None else found.value


def _spread(row: Row) -> Any:
    found = quantity_of(row)
    return None if _unsound(row) or found is None or found.low == found.high else span((found.low, found.high))


def _figure(first: RunRows, second: RunRows, network: str, lines: Sequence[Row]) -> Figure | None:
    # Bytes that are the same need no picture.
    compared = [
        line
        for line in lines
        if number(line, "ratio") and "low" in line and (line["seen"] != SAME or line["unit"] != "MiB")
    ]
    bars, ends = [], [1.0]
    for line in sorted(compared, key=lambda line: line["seen"] == SAME)[:_MOST_BARS]:
        low_high = line["low"], line["high"]
        ends += [line["ratio"], *low_high]
        note = f"{line['ratio']:.3f} {line['seen']}"
        bars.append(Bar(text(line, "benchmark"), in_words(line), note, (), low_high, line["ratio"], 1.0))
    if not bars:
        return None
    order = [experiment.benchmark for experiment in first.experiments]
    bars.sort(key=lambda bar: order.index(bar.group))
    title = ", ".join(filter(None, [f"{second.name} / {first.name}", network]))
    said = [f"{bar.label}: {bar.note}." for bar in bars]
    meaning = "ratio; whiskers: one's p10 over the other's p90, and the reverse"
    return Figure(title, " ".join(said), draw_bars(bars, logarithmic(ends), meaning))


def _seen(first: RunRows, second: RunRows, lines: Sequence[Row]) -> list[str]:
    """Sentences on one network's rows: how many differ, and which differs most."""
    seen = [text(line, "seen").split(":")[0] for line in lines]
    order = [*dict.fromkeys(word for words in _WORDS.values() for word in words), SAME, NOT_COMPARED]
    counts = [f"{seen.count(word)} {word}" for word in order if word in seen]
    things = counted(len(lines), "thing")
    said = [f"Of {things} measured in both, {second.name} against {first.name}: {listed(counts)}."]
    differing = [line for line in lines if number(line, "ratio") and line["seen"] != SAME]
    if differing:
        most = max(differing, key=lambda line: max(line["ratio"], 1 / line["ratio"]))
        both = f"{_in_words(most['first'])} in {first.name}, {_in_words(most['second'])} in {second.name}"
        said.append(f"The largest difference: {in_words(most)}, {most['ratio']:.2f} times, {most['seen']}: {both}.")
    return said


def _in_words(row: Row) -> str:
    """A row's value, with its spread if it has one."""
    found = quantity_of(row)
    assert found is not None
    measured = f"{short(found.value)} {found.unit}".strip()
    return measured if found.low == found.high else f"{measured} (spread {span((found.low, found.high))})"
