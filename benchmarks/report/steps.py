"""Rows of training steps, as several benchmarks have them: their groups, columns and bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..harness.results import counts
from ..harness.tables import CHECK, Column, Table, field, numeric
from ..harness.values import (
    Row,
    badge,
    buffer_bytes,
    by,
    check,
    is_sound,
    listed,
    number,
    percent,
    short,
    signed,
    size,
    span,
    spread,
    strategy,
    text,
)
from .axis import linear
from .bars import Bar, draw_bars
from .figure import Figure, Key
from .sentences import exposed_share, exposed_spread, exposure, extremes, of_group, time_of, timed

BETWEEN = "between frameworks"  # the part that compares single-process training of both
_COMPUTE, _EXPOSED, _WHOLE = 0, 1, 2


def is_step(row: Row) -> bool:
    """Whether a row is about a strategy's step."""
    return "strategy" in row and "trace" not in row


def without_comparison(rows: Sequence[Row]) -> list[Row]:
    """All rows except the sound one that compares the frameworks, which ``between_frameworks`` describes."""
    return [row for row in rows if not (text(row, "part").startswith(BETWEEN) and is_sound(row))]


def name(row: Row) -> str:
    """A row's first cell: its strategy, or its part if it failed before it had one."""
    return strategy(row) or text(row, "part") or text(row, "benchmark")


def group(row: Row) -> str:
    """What comparable rows share: framework, model, backend and number of ranks."""
    ranks = f"{text(row, 'num_ranks')} ranks" if "num_ranks" in row else ""
    return ", ".join(filter(None, [text(row, "framework"), text(row, "model"), text(row, "backend"), ranks]))


def ranks(row: Row) -> str | None:
    """Number and kind of ranks."""
    return " ".join(filter(None, [text(row, "num_ranks"), text(row, "kind")])) or None


def collectives(name: str, key: str | None = None) -> Column:
    """A column that counts the collectives listed under a key, by default the column's name."""

    def of(row: Row) -> str | None:
        found = row.get(key or name)
        if not isinstance(found, list):
            return None
        return counts([(str(one[0]), one[1]) for one in found if isinstance(one, list | tuple) and len(one) == 2])

    return Column(name, of)


def exposed(row: Row) -> Any:
    """Exposed communication in ms, or "not run" for a step that was not timed without its communication."""
    is_timed = number(row, "median_ms") is not None
    return "not run" if is_timed and row.get("exposed_ms", 0) is None else number(row, "exposed_ms")


def on_device(row: Row) -> Any:
    """A step's time on its device in ms, or "not run" where that was tried and failed."""
    return "not run" if text(row, "no_device_ms") else number(row, "device_ms")


STEP_COLUMNS = (
    Column("strategy", name),
    field("framework"),
    field("backend", is_wide=True),
    Column("ranks", ranks, is_wide=True),
    collectives("planned"),
    collectives("compiled"),
    numeric("loss", "loss", unit="nats", form=lambda value: f"{value:.3f}"),
    numeric("max diff", "max_weight_difference", form=lambda value: f"{value:.1e}"),
    numeric("step", "median_ms", unit="ms"),
    Column("p10\N{EN DASH}p90", spread, "ms", span),
    numeric("in a row", "in_a_row_ms", unit="ms"),
    Column("device", on_device, "ms"),
    Column("exposed", exposed, "ms", signed),
    Column("p10\N{EN DASH}p90", exposed_spread, "ms", lambda both: " to ".join(map(signed, both))),
    Column("exposed", exposed_share, "of the step", percent),
    CHECK,
)


def step_table(caption: str, rows: Sequence[Row], columns: Sequence[Column] = STEP_COLUMNS) -> Table:
    """Makes a table of steps."""
    note = (
        "planned and compiled: gradient collectives of a step (AR all-reduce, RS reduce-scatter, AG all-gather);"
        " exposed: step time less that of the same step without communication, median over interleaved rounds;"
        " max diff: of any weight to single-process training"
    )
    return Table(caption, columns, rows, note, group=lambda row: text(row, "framework"))


def how_ranks_run(rows: Sequence[Row]) -> str:
    """Ranks, backend and device of each framework."""
    of = {text(row, "framework"): ", ".join(text(row, key) for key in ("ranks", "backend", "device")) for row in rows}
    return "; ".join(f"{framework}: {words}" for framework, words in of.items())


def device_notes(rows: Sequence[Row]) -> list[str]:
    """What a step's time on its device is, and why rows have none."""
    if not any("device_ms" in row for row in rows):
        on_cpus = rows and all(text(row, "device") == "cpu" for row in rows)
        return ["device: a step's time on its GPU; on CPUs there is none, since the host computes"] if on_cpus else []
    notes = [
        "device: from a step's first operation on its GPU to the last, in steps after all timed rounds; torchref's by"
        " CUDA events and without the loss over ranks, jaxddp's by the profiler"
    ]
    untimed = [row for row in rows if on_device(row) == "not run"]
    for reason, some in by(untimed, lambda row: text(row, "no_device_ms")).items():
        of = listed(list(dict.fromkeys(f"{text(row, 'framework')} {name(row)}" for row in some)))
        notes.append(f"device, not run: {reason} ({of})")
    return notes


def between_frameworks(rows: Sequence[Row]) -> list[str]:
    """How far single-process training differs between the two frameworks."""
    return [
        f"single-process JAX against single-process PyTorch: weights {row['max_weight_difference']:.1e},"
        f" loss {row['max_metric_difference']:.1e}, {check(row)}"
        for row in rows
        if text(row, "part").startswith(BETWEEN) and number(row, "max_weight_difference") is not None
    ]


def step_figure(title: str, rows: Sequence[Row]) -> Figure | None:
    """Draws steps as bars, split into computation and exposed communication.

    Wrong rows get no bar, and rows that time nothing are left out. Returns None if no row has a time.
    """
    rows = [row for row in rows if not is_sound(row) or number(row, "median_ms") is not None]
    if not timed(rows):
        return None
    tops = [max(number(row, "median_ms") or 0, (spread(row) or (0, 0))[1]) for row in timed(rows)]
    styles = [_WHOLE if number(row, "exposed_ms") is None else _COMPUTE for row in timed(rows)]
    legend = [
        Key("step without communication", _COMPUTE), Key("exposed communication", _EXPOSED),
        Key("step, not split", _WHOLE),
    ]  # fmt: skip
    used = [key for key in legend if key.style in styles or (key.style == _EXPOSED and _COMPUTE in styles)]
    return Figure(
        title,
        " ".join(
            of_group(each, extremes(members, name, "step") or _all(members))
            for each, members in by(rows, group).items()
        ),
        draw_bars(
            [_bar(row) for row in rows], linear(tops), "one training step, median; whiskers p10\N{EN DASH}p90, ms"
        ),
        tuple(used),
    )


def step_sentences(rows: Sequence[Row]) -> list[str]:
    """Sentences for each framework, at its largest number of ranks: the shortest step, exposed communication."""
    said = []
    for framework, members in by(rows, lambda row: text(row, "framework")).items():
        most = max((number(row, "num_ranks") or 0 for row in members), default=0)
        largest = [row for row in members if (number(row, "num_ranks") or 0) == most]
        for each, compared in by(largest, group).items():
            if framework:
                sentences = [extremes(compared, name, "step"), exposure(compared, name)]
                said.append(of_group(each, " ".join(filter(None, sentences))))
    return [sentence for sentence in said if sentence]


def in_words(row: Row) -> str:
    """Describes a row in a line."""
    said = [text(row, key) for key in ("name", "framework", "model", "target", "collective")]
    said += [name(row)] if "strategy" in row else []
    num_bytes = buffer_bytes(row)
    said += [size(num_bytes)] if num_bytes is not None else []
    said += [text(row, key) for key in ("moment", "mode", "how", "curve", "size", "backend")]
    said = list(filter(None, [*said, f"{text(row, 'num_ranks')} ranks" if "num_ranks" in row else ""]))
    return ", ".join(said) or text(row, "part")


def _all(rows: Sequence[Row]) -> str:
    times = [f"{name(row)} {time_of(row)}" for row in timed(rows)]
    return f"{listed(times)}." if times else ""


def _bar(row: Row) -> Bar:
    median = number(row, "median_ms")
    if not is_sound(row) or median is None or median <= 0:
        return Bar(group(row), name(row), f"{badge(row) or 'no time'}, see the table")
    exposed = number(row, "exposed_ms")
    if exposed is None:
        segments: tuple[tuple[int, float, str], ...] = ((_WHOLE, median, f"step: {short(median)} ms"),)
        note = f"{short(median)} ms"
    else:
        shown = min(max(exposed, 0.0), median)
        segments = (
            (_COMPUTE, median - shown, f"without communication: {short(median - shown)} ms"),
            (_EXPOSED, shown, f"exposed communication: {short(exposed)} ms"),
        )
        note = f"{short(median)} ms, {signed(exposed)} exposed"
    return Bar(group(row), name(row), note, segments, spread(row))
