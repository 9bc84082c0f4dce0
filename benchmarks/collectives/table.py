"""How the collectives are shown: tables in the terminal and in ``table.md``, and in words what they come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..harness.results import counts
from ..harness.run import FAILED, NOT_RUN
from ..harness.tables import NOTHING, Column, markdown_table, terminal_table, value, write_markdown
from .cases import NAMES
from .fit import MIN_SIZES
from .ratio import PAIRS, ratios
from .sizes import in_words

Row = Mapping[str, Any]

SHOWN_SIZES = 4  # in a terminal; if there are more, the smallest, one in the middle and the largest
_BACKENDS = ("XLA over NCCL", "NCCL", "XLA over Gloo", "XLA in-process", "Gloo")


def print_tables(console: Console, rows: Sequence[Row], said: Sequence[str]) -> None:
    """Prints what was measured: every size where they are few, else some of them.

    Args:
        console: Where to.
        rows: Of this benchmark.
        said: Notes.
    """
    timed, fits = timed_rows(rows), fits_of(rows)
    sizes = sorted({row["asked_bytes"] for row in timed})
    shown = sizes if len(sizes) <= SHOWN_SIZES else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    console.print()
    if timed:
        few = "" if shown == sizes else f", {len(shown)} of {len(sizes)} sizes (all are in table.md)"
        console.print(terminal_table([row for row in timed if row["asked_bytes"] in shown], COLUMNS, f"calls{few}"))
    if fits:
        console.print(terminal_table(fits, FIT_COLUMNS, "fits: time = alpha + size / rate"))
    for note in said:
        console.print(f"[dim]{note}[/dim]", soft_wrap=True)


def write_tables(folder: Path, rows: Sequence[Row], said: Sequence[str]) -> None:
    """Writes ``table.md``.

    Args:
        folder: Of the run.
        rows: Of this benchmark.
        said: Notes.
    """
    tables = [markdown_table(some, columns) for some, columns in
              ((timed_rows(rows), COLUMNS), (fits_of(rows), FIT_COLUMNS)) if some]  # fmt: skip
    write_markdown(folder, tables, said)


def timed_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of calls, those that failed included, with what is to be compared side by side."""
    return sorted(filter(_is_call, rows), key=_order)


def fits_of(rows: Sequence[Row]) -> list[Row]:
    """The rows of fits, in the same order."""
    return sorted((row for row in rows if "num_sizes" in row), key=_order)


def notes(rows: Sequence[Row]) -> list[str]:
    """Says what the columns mean, and what was found.

    Args:
        rows: Of this benchmark.

    Returns:
        Lines.
    """
    return [
        "time: of a round the slowest rank's; median and p10-p90 over rounds. The collectives of a size take turns,"
        " with a barrier before each call; backends run one after the other, in processes of their own",
        "algbw: bytes of the full buffer over the time of a call; busbw: that times what a rank must send at least, as"
        " a multiple of the buffer: 2 (N-1)/N of an all-reduce, (N-1)/N of a reduce-scatter or all-gather, else 1; it"
        " compares with the speed of the links, whatever the number of ranks",
        "planned and found: AR all-reduce, RS reduce-scatter, AG all-gather, ATA all-to-all, which stands in for XLA's"
        " reduce-scatter over Gloo (see jaxddp/gloo.py), CP collective-permute, SR send-recv, B"
        " broadcast, R reduce; XLA's read back from the compiled program, torch's as issued. XLA has no broadcast or"
        " reduce for every backend: jaxddp's are all-reduces",
        "XLA writes into new buffers; torch's all_reduce and broadcast work in place; on CPUs both keep freed memory",
        "simulated devices (XLA in-process) copy within one memory and send nothing",
        *_kernels_in_words(rows),
        *_fits_in_words(rows),
        *_ratios_in_words(rows),
        *_left_out(rows),
    ]


def _kernels_in_words(rows: Sequence[Row]) -> Iterator[str]:
    if any(row.get("kernel") for row in rows):
        yield "kernel: how XLA carries a collective out on GPUs; DEFAULT is NCCL's, the others are XLA's own"


def _fits_in_words(rows: Sequence[Row]) -> Iterator[str]:
    found = [row for row in fits_of(rows) if row["collective"] == "all_reduce"]
    for row in found:
        if row["alpha_us"] is None:
            yield f"all_reduce, {_where(row)}: no fit, {row['check']}"
            continue
        beta = 1e3 / row["gb_per_s"]  # us per 10^6 bytes
        yield (
            f"all_reduce, {_where(row)}: a call costs {row['alpha_us']:.0f} us (alpha, 95 % interval"
            f" {_ends(row, 'alpha_low_us', 'alpha_high_us', '.0f')}) and {beta:,.0f} us per 10^6 bytes of the"
            f" buffer (beta; {row['gb_per_s']:.3g} GB/s, {_ends(row, 'gb_per_s_low', 'gb_per_s_high', '.3g')}): a"
            f" rank sends {row['bus_gb_per_s']:.3g} GB/s; off by at most {row['worst_error']:.0%} at any size"
        )
    if timed_rows(rows) and not found:
        yield f"no fit: it takes {MIN_SIZES} sizes of a collective that are right"


def _ratios_in_words(rows: Sequence[Row]) -> Iterator[str]:
    for num_ranks in sorted({row["num_ranks"] for row in timed_rows(rows)}):
        for pair in PAIRS:
            for last in ratios(rows, pair, num_ranks)[-1:]:
                yield (
                    f"all_reduce of {in_words(last.asked_bytes)}, {num_ranks} ranks: {pair[0]} has {last.value:.2f}"
                    f" times the bandwidth of {pair[1]} (95 % interval {last.low:.2f} to {last.high:.2f}, of rounds;"
                    " the two did not run at the same time)"
                )


def _left_out(rows: Sequence[Row]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row["check"].startswith((NOT_RUN, FAILED)) and not _is_call(row):
            by_reason.setdefault(row["check"], []).append(row["part"])
    for reason, where in by_reason.items():
        yield f"{'; '.join(dict.fromkeys(where))}: {reason}"


def _is_call(row: Row) -> bool:
    return "asked_bytes" in row and not row["check"].startswith(NOT_RUN)


def _where(row: Row) -> str:
    return f"{row['backend']}, {row['num_ranks']} ranks"


def _order(row: Row) -> tuple[int, int, int, int]:
    return (
        NAMES.index(row["collective"]),
        row["num_ranks"],
        row.get("asked_bytes", 0),
        _BACKENDS.index(row["backend"]),
    )


def _counted(key: str) -> Any:
    return lambda row: counts(row[key]) if key in row else NOTHING


def _ms(number: float) -> str:
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 3}f}"


def _ends(row: Row, low: str, high: str, form: str) -> str:
    if row.get(low) is None:
        return NOTHING
    return f"at least {row[low]:{form}}" if row[high] is None else f"{row[low]:{form}} to {row[high]:{form}}"


COLUMNS = (
    Column("collective", "", lambda row: row["collective"], is_text=True),
    Column("ranks", "", lambda row: str(row["num_ranks"])),
    Column("size", "", lambda row: in_words(row["asked_bytes"])),
    Column("backend", "", lambda row: row["backend"], is_text=True),
    Column("time", "ms", lambda row: _ms(row["median_ms"]) if "median_ms" in row else NOTHING),
    Column("p10-p90", "ms", lambda row: f"{_ms(row['p10_ms'])}-{_ms(row['p90_ms'])}" if "p10_ms" in row else NOTHING),
    Column("rounds", "", value("num_rounds", "d")),
    Column("algbw", "GB/s", value("algbw_gb_per_s", ".3g")),
    Column("busbw", "GB/s", value("busbw_gb_per_s", ".3g")),
    Column("planned", "", _counted("planned")),
    Column("found", "", _counted("compiled")),
    Column("kernel", "", value("kernel", "s"), is_text=True),
    Column("check", "", lambda row: row["check"], is_text=True),
)
FIT_COLUMNS = (
    Column("collective", "", lambda row: row["collective"], is_text=True),
    Column("ranks", "", lambda row: str(row["num_ranks"])),
    Column("backend", "", lambda row: row["backend"], is_text=True),
    Column("sizes", "", value("num_sizes", "d")),
    Column("alpha", "us", value("alpha_us", ".0f")),
    Column("95 %", "us", lambda row: _ends(row, "alpha_low_us", "alpha_high_us", ".0f")),
    Column("rate", "GB/s", value("gb_per_s", ".3g")),
    Column("95 %", "GB/s", lambda row: _ends(row, "gb_per_s_low", "gb_per_s_high", ".3g")),
    Column("a rank sends", "GB/s", value("bus_gb_per_s", ".3g")),
    Column("off by", "at most", value("worst_error", ".0%")),
    Column("check", "", lambda row: row["check"], is_text=True),
)
