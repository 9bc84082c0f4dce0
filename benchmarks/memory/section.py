"""Memory of a device by component and moment, beside its formula and the assignment report's figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ..harness.tables import CHECK, Column, Table, field, numeric
from ..harness.values import MIB, Row, badge, by, check, is_sound, listed, mib, number, strategy, text
from ..report.axis import linear
from ..report.bars import Bar, draw_bars
from ..report.figure import Figure, Key
from ..report.section import Section
from ..report.sentences import left_out

_COMPONENTS = (
    ("parameters", ("parameters",)),
    ("optimizer state", ("optimizer_state",)),
    ("activations", ("activations",)),
    ("gradients", ("gradients",)),
    ("buckets", ("buckets",)),
    ("others", ("others", "batch", "padding", "updates")),
)


def held(row: Row, keys: Sequence[str]) -> float | None:
    """Bytes of some components together; None if the row has none of them."""
    found = [value for key in keys if (value := number(row, "compiled", key)) is not None]
    return sum(found) if found else None


def total(row: Row) -> float | None:
    """Bytes of all components."""
    return held(row, [key for _, keys in _COMPONENTS for key in keys])


_COLUMNS = (
    Column("strategy", lambda row: text(row, "strategy") or text(row, "part")),
    field("moment"),
    field("is"),
    *(Column(name, partial(held, keys=keys), "MiB", mib) for name, keys in _COMPONENTS),
    Column("compiled", lambda row: total(row), "MiB", mib),
    numeric("formula", "formula", unit="MiB", form=mib),
    CHECK,
)
_ALLOCATOR_COLUMNS = (
    field("allocator", "strategy"),
    Column("device", lambda row: text(row["allocator"], "device")),
    numeric("ranks", "allocator", "num_ranks", form=str),
    *(
        numeric(words, "allocator", key, unit="MiB", form=mib)
        for words, key in (
            ("in use after init", "after_init"),
            ("peak of the step", "peak"),
            ("in use after the step", "after_step"),
        )
    ),
    CHECK,
)
_PUBLISHED_COLUMNS = (
    Column("figure", lambda row: text(row["figure"], "name")),
    numeric("the assignment report", "figure", "says_mib", unit="MiB", form=lambda value: f"{value:,.7g}"),
    numeric("corrected", "figure", "corrected", unit="MiB", form=mib),
    numeric("here", "figure", "here", unit="MiB", form=mib),
    Column("differ by", check),
    Column("why they differ", lambda row: text(row["figure"], "why"), is_wide=True),
)


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    figures = [row for row in rows if isinstance(row.get("figure"), dict)]
    allocators = [row for row in rows if "allocator" in row]
    held_rows = [row for row in rows if row not in figures and row not in allocators]
    counted = [row for row in allocators if isinstance(row["allocator"], dict)]
    parts = [
        _figure(held_rows),
        Table("Bytes on each device by strategy and moment", _COLUMNS, held_rows, _note(rows), group=strategy),
        Table("What the device's allocator says", _ALLOCATOR_COLUMNS, counted),
    ]
    published = Table("Memory in the assignment report and here", _PUBLISHED_COLUMNS, figures) if figures else None
    sentences = [*_sentences(held_rows), left_out(held_rows)]
    notes = [*_notes(held_rows), _ALLOCATOR_NOTE if counted else ""]
    return Section("Memory of a step", sentences, parts, published, notes)


_ALLOCATOR_NOTE = (
    "allocators: of rank 0, over two steps. The peak is that of the whole step, because an allocator does not see its"
    " moments; after it the state and what was not freed are in use; check: the distance from the formula"
)


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "compiled: the program's arguments, and what is alive beside them at the peak before and after the end of the"
        " backward, read from its schedule. Activations are made by the forward, gradients by the backward (those of"
        " activations too: the program does not tell them apart), buckets are what collectives send and receive"
    )
    yield (
        "check: what lives across steps equals its formula to the byte; at the other moments, the distance of the"
        " compiled program from its formula"
    )
    for name, some in by([row for row in rows if number(row, "temporaries")], strategy).items():
        alive = max(held(row, ("activations", "gradients", "buckets", "updates")) or 0 for row in some)
        tiles = number(some[0], "compiled", "padding")
        if alive:
            yield (
                f"{name}: the compiler lays temporaries out in {mib(some[0]['temporaries'])} MiB,"
                f" {some[0]['temporaries'] / alive - 1:.1%} more than is alive at the peak; padding of shards"
                f" {number(some[0], 'padding_share') or 0:.4%}" + (f", of layouts {mib(tiles)} MiB" if tiles else "")
            )


def _note(rows: Sequence[Row]) -> str:
    silent = {f"allocator: not run, {row['allocator']}" for row in rows if isinstance(row.get("allocator"), str)}
    return "; ".join(["others: batch, counters, key, padding, updates that are not in place", *sorted(silent)])


def _figure(rows: Sequence[Row]) -> Figure | None:
    totals = [value for row in rows if (value := total(row)) is not None]
    if not totals:
        return None
    moments = by([row for row in rows if text(row, "moment")], lambda row: text(row, "moment"))
    bars = [_bar(moment, row) for moment, some in moments.items() for row in some]
    said = [
        f"{moment}: {listed([f'{strategy(row)} {mib(total(row) or 0)} MiB' for row in some if is_sound(row)])}."
        for moment, some in moments.items()
    ]  # fmt: skip
    axis = linear([value / MIB for value in totals], lambda value: f"{value:,.0f}")
    legend = tuple(Key(name, style) for style, (name, _) in enumerate(_COMPONENTS))
    return Figure(
        f"Memory of a device by moment{_of(rows)}", " ".join(said), draw_bars(bars, axis, "MiB on each device"), legend
    )


def _of(rows: Sequence[Row]) -> str:
    models = list(by(rows, lambda row: " on ".join(filter(None, [text(row, "model"), text(row, "target")]))))
    return f": {listed(models)}" if any(models) else ""


def _bar(moment: str, row: Row) -> Bar:
    value = total(row)
    if not is_sound(row) or value is None:
        return Bar(moment, text(row, "strategy"), f"{badge(row) or 'nothing'}, see the table")
    parts = [(style, name, held(row, keys) or 0) for style, (name, keys) in enumerate(_COMPONENTS)]
    segments = tuple((style, part / MIB, f"{name}: {mib(part)} MiB") for style, name, part in parts if part)
    return Bar(moment, text(row, "strategy"), f"{mib(value)} MiB", segments)


def _sentences(rows: Sequence[Row]) -> list[str]:
    said = []
    for moment, some in by(
        [row for row in rows if is_sound(row) and total(row)], lambda row: text(row, "moment")
    ).items():
        least, most = min(some, key=lambda row: total(row) or 0), max(some, key=lambda row: total(row) or 0)
        low, high = total(least) or 0, total(most) or 1
        if low < high:
            said.append(
                f"{moment.capitalize()} {text(least, 'strategy')} holds least, {mib(low)} MiB on each device,"
                f" {low / high:.2f} of what {text(most, 'strategy')} holds, {mib(high)} MiB."
            )
    exact = [row for row in rows if is_sound(row) and number(row, "formula") == total(row)]
    compared = [row for row in rows if is_sound(row) and number(row, "formula") and total(row)]
    if compared:
        worst = max(compared, key=lambda row: abs((total(row) or 0) / row["formula"] - 1))
        far = (total(worst) or 0) / worst["formula"] - 1
        said.append(
            f"{len(exact)} of {len(compared)} compiled sums are their formula's to the byte; the farthest, of"
            f" {text(worst, 'strategy')} {text(worst, 'moment')}, is {far:+.1%} from it."
        )
    return said
