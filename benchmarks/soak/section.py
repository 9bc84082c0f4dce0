"""Reliability: faults tried, noticed in, ended in, back after, left behind; and the parts of goodput."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from ..harness.tables import CHECK, Column, Table, field, numeric
from ..harness.values import NONE, Row, by, check, counted, is_bad, number, percent, plain, short, text
from ..report.axis import linear
from ..report.bars import Bar, draw_bars
from ..report.figure import Figure, Key
from ..report.section import Section
from ..report.sentences import left_out
from .goodput import PARTS, RESTART, START, USEFUL

_MEDIAN_MOST = f"median {NONE} longest"


def _spread(name: str) -> Column:
    """Median and maximum of a time over the faults of a kind."""

    def form(both: tuple[float, float]) -> str:
        return f"{both[0]:.1f} {NONE} {both[1]:.1f}"

    def of(kind: Row) -> tuple[float, float] | None:
        found = [value for row in kind["faults"] if (value := number(row, name)) is not None]
        return (median(found), max(found)) if found else None

    return Column(_HEADINGS[name], of, f"s, {_MEDIAN_MOST}", form)


_HEADINGS = {"noticed_s": "time to detect", "ended_s": "all ended", "back_s": "time to recover"}
_BY_KIND = (
    field("fault"),
    field("side"),
    numeric("tried", "tried", form=plain),
    numeric("noticed", "noticed", form=plain),
    *(_spread(name) for name in _HEADINGS),
    numeric("steps lost", "steps_lost", unit="mean", form=lambda value: f"{value:.1f}"),
    field("left behind", "left_behind"),
    CHECK,
)
_EACH = (
    field("fault"),
    field("side"),
    numeric("rank", "rank", form=plain),
    numeric("at step", "step", form=lambda value: f"{value:,.0f}"),
    *(numeric(heading, name, unit="s", form=lambda value: f"{value:.1f}") for name, heading in _HEADINGS.items()),
    numeric("steps lost", "steps_lost", form=plain),
    numeric("lines printed", "lines", form=plain),
    field("left behind", "left_behind"),
    CHECK,
)
_GOODPUT = (
    field("side"),
    numeric("minutes", "minutes", form=lambda value: f"{value:.1f}"),
    numeric("faults", "num_faults", form=plain),
    numeric("steps", "step", form=lambda value: f"{value:,.0f}"),
    numeric("goodput", "goodput", form=percent),
    *(numeric(part, "parts_s", part, unit="s", form=lambda value: f"{value:,.1f}") for part in PARTS),
    numeric("max diff", "max_weight_difference", form=lambda value: f"{value:.1e}" if value else "0"),
    numeric("printed", "printed_bytes", unit="bytes", form=lambda value: f"{value:,.0f}"),
    numeric("logs", "log_bytes", unit="bytes", form=lambda value: f"{value:,.0f}"),
    CHECK,
)


def _signed(value: float) -> str:
    return f"{value:+.2f}"


_USAGE = (
    field("process", "role"),
    field("side"),
    numeric("lived", "lived_s", unit="s", form=lambda value: f"{value:,.0f}"),
    numeric("memory", "memory_mib", unit="MiB", form=lambda value: f"{value:,.0f}"),
    numeric("growth", "memory_mib_growth", unit="MiB", form=_signed),
    numeric("handles", "handles", form=plain),
    numeric("growth", "handles_growth", form=_signed),
    numeric("threads", "threads", form=plain),
    numeric("growth", "threads_growth", form=_signed),
    CHECK,
)


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    faults = [row for row in rows if "fault" in row]
    wholes = [row for row in rows if number(row, "goodput") is not None]
    used = [row for row in rows if "role" in row]
    kinds = [_kind(some) for some in by(faults, lambda row: (text(row, "fault"), text(row, "side"))).values()]
    kinds.sort(key=lambda kind: kind["fault"])
    note = (
        "time to detect: until another process or the launcher printed a line or ended; a full disk is noticed by the"
        " next save. time to recover: until the first step after the restart. steps lost are repeated"
    )
    of_processes = "of each kind of process the one that lived longest; growth: slope over its life, without its start"
    parts = [
        _figure(wholes) if wholes else None,
        Table("Faults by kind", _BY_KIND, kinds, note),
        Table("Goodput and its parts", _GOODPUT, wholes),
        Table("What processes use", _USAGE, used, of_processes),
        Table("Each fault", _EACH, faults, is_brief=lambda row: check(row) != "ok"),
    ]
    return Section("Reliability", [*map(_in_words, wholes), left_out(rows)], parts)


def _kind(faults: Sequence[Row]) -> dict[str, Any]:
    """The faults of a kind on a side as one row."""
    behind = [text(row, "left_behind") for row in faults if text(row, "left_behind") != "nothing"]
    odd = [check(row) for row in sorted(faults, key=is_bad, reverse=True) if check(row) != "ok"]
    lost = [value for row in faults if (value := number(row, "steps_lost")) is not None]
    return {
        "fault": text(faults[0], "fault"), "side": text(faults[0], "side"), "faults": faults, "tried": len(faults),
        "noticed": sum(number(row, "noticed_s") is not None for row in faults),
        "steps_lost": sum(lost) / len(lost) if lost else None,
        "left_behind": f"{behind[0]} ({len(behind)} of {len(faults)})" if behind else "nothing",
        "check": f"{odd[0]} ({len(odd)} of {len(faults)})" if odd else "ok",
    }  # fmt: skip


def _figure(wholes: Sequence[Row]) -> Figure:
    """The parts of each side as shares of its time; starts and restarts are one part."""
    drawn = [part for part in PARTS if part != START]
    bars, said = [], []
    for row in wholes:
        seconds = {part: number(row, "parts_s", part) or 0.0 for part in PARTS}
        seconds[RESTART] += seconds.pop(START)
        total = sum(seconds.values()) or 1.0
        shares = {part: 100 * seconds[part] / total for part in drawn}
        segments = tuple(
            (style, share, f"{part}: {short(share)} %") for style, (part, share) in enumerate(shares.items())
        )
        note = f"goodput {percent(row['goodput'])}, {counted(int(number(row, 'num_faults') or 0), 'fault')}"
        bars.append(Bar("", text(row, "side"), f"{note} in {number(row, 'minutes') or 0:.1f} minutes", segments))
        said.append(f"{text(row, 'side')}: " + ", ".join(f"{part} {short(share)} %" for part, share in shares.items()))
    drawing = draw_bars(bars, linear([100.0]), "% of the time")
    names = ["start and restart" if part == RESTART else part for part in drawn]
    return Figure(
        "Where the time went", ". ".join(said) + ".", drawing, tuple(Key(name, i) for i, name in enumerate(names))
    )


def _in_words(row: Row) -> str:
    """A side's goodput, and whether its weights are right."""
    seconds = number(row, "parts_s", USEFUL)
    words = (
        f"{text(row, 'side')}: goodput {percent(row['goodput'])}: {short(seconds or 0)} s of"
        f" {number(row, 'minutes') or 0:.1f} minutes were steps that had not been taken before,"
        f" with {counted(int(number(row, 'num_faults') or 0), 'fault')} on {text(row, 'num_ranks')} ranks"
    )
    if number(row, "max_weight_difference") == 0:
        words += (
            f"; after step {number(row, 'step') or 0:,.0f} the weights equal those of an undisturbed run, bit for bit"
        )
    return f"{words}. The disk that filled up was {text(row, 'disk')}."
