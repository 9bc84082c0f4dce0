"""Gates: ratios of step times with their intervals and limits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..harness.ratios import NOT_JUDGED, WIDEST
from ..harness.tables import CHECK, Column, Table, field, numeric
from ..harness.values import NONE, Row, badge, counted, ends, is_bad, is_sound, number, span, text
from ..report.axis import linear
from ..report.bars import Bar, draw_bars
from ..report.figure import Figure
from ..report.section import Section
from ..report.sentences import left_out, timed
from ..report.steps import between_frameworks, how_ranks_run, step_figure, step_table, without_comparison

interval = partial(ends, low="low", high="high")  # the 95 % interval of a ratio
_COLUMNS = (
    field("gate", "name"),
    numeric("ratio", "ratio", form=lambda value: f"{value:.3f}"),
    Column("95 % interval", interval, form=lambda both: NONE.join(f"{end:.3f}" for end in both)),
    numeric("limit", "limit", form=lambda value: f"{value:.2f}"),
    numeric("rounds", "num_rounds", form=lambda value: f"{value:.0f}"),
    field("ours"),
    numeric("step", "ours_ms", unit="ms"),
    Column(f"p10{NONE}p90", partial(ends, low="ours_p10_ms", high="ours_p90_ms"), "ms", span),
    field("theirs"),
    numeric("step", "theirs_ms", unit="ms"),
    Column(f"p10{NONE}p90", partial(ends, low="theirs_p10_ms", high="theirs_p90_ms"), "ms", span),
    Column("rounds", lambda row: "not interleaved" if row.get("is_interleaved") is False else "", "taken"),
    CHECK,
)


def is_gate(row: Row) -> bool:
    """Whether a row is a ratio and its limit, measured or not."""
    return "name" in row and "limit" in row


def section(rows: Sequence[Row]) -> Section:
    """Makes the section."""
    gates = [row for row in rows if is_gate(row)]
    steps = without_comparison([row for row in rows if not is_gate(row)])
    parts = [gate_figure(gates), gate_table(gates)]
    parts += [step_figure("The steps behind the ratios", steps), step_table("Steps", steps)]
    sentences = [*gate_sentences(gates), *between_frameworks(rows), left_out(steps)]
    return Section("Gates", sentences, parts, notes=[how_ranks_run(timed(steps))])


def gate_table(gates: Sequence[Row]) -> Table:
    """Makes a table of ratios."""
    note = (
        "ratio: the median of the rounds' ratios where both sides took turns, else that of the medians;"
        " a gate holds if its ratio is within its limit, and is missed if all of its interval is beyond it; it is not"
        f" judged if the limit lies between, or the interval is wider than {WIDEST:.0%} of the limit"
    )
    return Table("Ratios and their limits", _COLUMNS, gates, note)


def gate_figure(gates: Sequence[Row]) -> Figure | None:
    """Draws ratios as intervals beside their limits; None if there is none."""
    gates = [row for row in gates if number(row, "ratio") is not None]
    if not gates:
        return None
    values = [v for row in gates for v in (row["ratio"], *(interval(row) or ()), number(row, "limit")) if v is not None]
    axis = linear(values, start=min([0.9, *(0.98 * value for value in values)]))
    return Figure(
        "Ratios of step times",
        " ".join(_in_words(row) for row in gates),
        draw_bars([_bar(row) for row in gates], axis, "ratio; whiskers 95 % interval, vertical line the limit"),
    )


def gate_sentences(gates: Sequence[Row]) -> list[str]:
    """Sentences on how many gates hold, and on the missed ones or the one nearest to its limit."""
    limited = [row for row in gates if (number(row, "limit") or 0) > 0 and number(row, "ratio") is not None]
    if not limited:
        return []
    missed = [row for row in limited if is_bad(row)]
    unjudged = [row for row in limited if text(row, "check").startswith(NOT_JUDGED)]
    holding = len(limited) - len(missed) - len(unjudged)
    said = [f"{holding} of {counted(len(limited), 'gate')} {'holds' if holding == 1 else 'hold'}."]
    if unjudged:
        said.append(f"{len(unjudged)} could not be judged.")
    nearest = max(limited, key=lambda row: (interval(row) or (row["ratio"],))[0] / row["limit"])
    return [*said, *map(_in_words, missed or [nearest])]


def _in_words(row: Row) -> str:
    limit, low_high = number(row, "limit"), interval(row)
    words = f"{text(row, 'name')}: {row['ratio']:.3f}"
    if low_high is not None:
        words += f", 95 % interval {low_high[0]:.3f} to {low_high[1]:.3f}"
    return words + (f", limit {limit:.2f}{' MISSED' if is_bad(row) else ''}." if limit is not None else ".")


def _bar(row: Row) -> Bar:
    limit = number(row, "limit")
    note = f"{row['ratio']:.3f}" + (f", limit {limit:.2f}" if limit is not None else ", no limit")
    if not is_sound(row):
        note = f"{badge(row)}: {note}"
    elif text(row, "check").startswith(NOT_JUDGED):
        note = f"{NOT_JUDGED}{note}"
    return Bar("", text(row, "name"), note, (), interval(row), row["ratio"], limit)
