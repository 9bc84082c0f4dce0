"""How the memory benchmark shows and writes what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..harness.run import FAILED, NOT_RUN, Run
from ..harness.tables import NOTHING, Column, markdown_table, terminal_table, write_markdown

MIB = 2**20
_KINDS = ("parameters", "optimizer_state", "activations", "gradients", "buckets")

Row = Mapping[str, Any]
Cell = Callable[[Row], str]


def mib(num_bytes: float) -> str:
    """Writes bytes as MiB."""
    return f"{num_bytes / MIB:,.2f}"


def _total(row: Row) -> int:
    return sum(row["compiled"].values())


def _bytes_of(*path: str) -> Cell:
    """A cell of a field, or a field in it, that is in bytes."""

    def cell(row: Row) -> str:
        value: Any = row
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return NOTHING if value is None else mib(value)

    return cell


def _text(key: str, within: str = "") -> Cell:
    return lambda row: str((row[within] if within else row).get(key, NOTHING))


_CHECK = Column("check", "", lambda row: row["check"], is_text=True)
_COLUMNS = (
    Column("strategy", "", lambda row: row.get("strategy", row["part"]), is_text=True),
    Column("moment", "", _text("moment"), is_text=True),
    Column("is", "", _text("is"), is_text=True),
    *(Column(kind.replace("_", " "), "MiB", _bytes_of("compiled", kind)) for kind in _KINDS),
    Column("compiled", "MiB", lambda row: mib(_total(row)) if "compiled" in row else NOTHING),
    Column("formula", "MiB", _bytes_of("formula")),
    _CHECK,
)
_ALLOCATOR_COLUMNS = (
    Column("allocator", "", lambda row: row.get("strategy", row["part"]), is_text=True),
    Column("device", "", lambda row: row["allocator"]["device"], is_text=True),
    Column("ranks", "", lambda row: str(row["allocator"]["num_ranks"])),
    Column("in use after init", "MiB", _bytes_of("allocator", "after_init")),
    Column("peak of the step", "MiB", _bytes_of("allocator", "peak")),
    Column("in use after the step", "MiB", _bytes_of("allocator", "after_step")),
    _CHECK,
)
_WHY = Column("why they differ", "", _text("why", "figure"), is_text=True)
_SOURCE_COLUMNS = (
    Column("the source's figure", "", _text("name", "figure"), is_text=True),
    Column("it says", "MiB", lambda row: f"{row['figure']['says_mib']:,.7g}"),
    Column("corrected", "MiB", _bytes_of("figure", "corrected")),
    Column("here", "MiB", _bytes_of("figure", "here")),
    Column("differ by", "", lambda row: row["check"]),
)


def show(this: Run, title: str) -> None:
    """Makes the tables and notes of a run's rows."""
    compared = [row for row in this.rows if "figure" in row]
    counted = [row for row in this.rows if isinstance(row.get("allocator"), Mapping)]
    silent = [row for row in this.rows if row["part"].startswith("allocator") and row not in counted]
    held = [row for row in this.rows if row not in compared and row not in counted and row not in silent]
    notes = [*_notes([row for row in held if "compiled" in row]), *_allocator_notes(counted, silent)]
    shown = [(f"{title}, bytes on each device", _COLUMNS, held), ("allocators", _ALLOCATOR_COLUMNS, counted)]
    shown = [(name, columns, rows) for name, columns, rows in shown if rows]
    tables = [markdown_table(rows, columns) for _, columns, rows in shown]
    if compared:
        shown.append(("beside the source's", _SOURCE_COLUMNS, compared))
        tables.append(markdown_table(compared, (*_SOURCE_COLUMNS, _WHY)))
    for name, columns, rows in shown:
        this.console.print()
        this.console.print(terminal_table(rows, columns, name, has_groups=columns is _COLUMNS))
    for note in notes:
        this.console.print(f"[dim]{note}[/dim]", soft_wrap=True)
    write_markdown(this.folder, tables, notes)
    this.console.print(f"\nwritten to {this.folder}: table.md, metrics.jsonl", soft_wrap=True)


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield (
        "compiled: arguments of the program, and what is alive beside them at the peak before and after the end of the"
        " backward, read from its schedule; activations are made by the forward, gradients by the backward (those of"
        " activations too: the program does not tell them apart), buckets are what collectives send and receive"
    )
    yield (
        "check: what lives across steps is as the formula says, to the byte; at the other moments how far the compiled"
        " program is from its formula"
    )
    for name in dict.fromkeys(row["strategy"] for row in rows):
        moments = [row["compiled"] for row in rows if row["strategy"] == name]
        first = next(row for row in rows if row["strategy"] == name)
        alive = max(sum(held[kind] for kind in (*_KINDS[2:], "updates")) for held in moments)
        tiles = moments[0]["padding"]
        yield (
            f"{name}: the compiler lays temporaries out in {mib(first['temporaries'])} MiB,"
            f" {first['temporaries'] / alive - 1:.1%} more than is alive at the peak; padding of shards"
            f" {first['padding_share']:.4%}" + (f", of layouts {mib(tiles)} MiB" if tiles else "")
        )


def _allocator_notes(counted: Sequence[Row], silent: Sequence[Row]) -> Iterator[str]:
    if counted:
        yield (
            "allocators: what rank 0's says of two steps; the peak is that of the whole step, of whose moments it sees"
            " none, and after it the state and what was not freed are in use; check: how far from the formula"
        )
    for row in silent:
        said = row["check"]
        yield (
            f"allocator: {said.replace(NOT_RUN, 'not run, ')}"
            if not said.startswith(FAILED)
            else f"{row['part']}: {said}"
        )
