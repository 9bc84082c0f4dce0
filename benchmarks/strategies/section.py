"""The main job and the strategies: what a step takes, and how much of it is communication that nothing hides."""

from __future__ import annotations

from collections.abc import Sequence

from ..harness.tables import Table
from ..harness.values import Row, by, listed, number, text
from ..report.published import strategies_beside
from ..report.ratio import ratio_of
from ..report.section import Section
from ..report.sentences import few_rounds, left_out, timed
from ..report.steps import (
    between_frameworks,
    device_notes,
    group,
    how_ranks_run,
    is_step,
    name,
    step_figure,
    step_sentences,
    step_table,
    without_comparison,
)
from ..traces.section import TRACE_COLUMNS, trace_figures, trace_sentences
from ..training.measure import PEERS

_PEERS = frozenset(name for names in PEERS.values() for name in names)


_NOTES = (
    "planned and compiled: gradient collectives of one step, from the bucket plan and as read back from the compiled"
    " program; torchref compiles nothing, so its column lists the collectives issued; peers make plans of their own",
    "exposed, of jit: against naive without communication; some peers cannot run without their communication",
)
_IN_A_ROW = (
    "in a row: a step among several between two synchronisations, of which nothing is read before the last is done;"
    " torchref's without the loss over ranks"
)
_IN_TURNS = "the two frameworks took turns, a round each: what slows the machine down meanwhile slows both"
_UNLIKE = (
    "what is not the same work in the two frameworks: attention, which XLA compiles from matrix products and a softmax"
    " and torch has as one kernel; the loss, which strategies sum over ranks and torch's peers do not; and all that XLA"
    " and torch.compile fuse"
)
_TRACE_NOTE = (
    "one step of rank 0 as profiled, so there is no spread; overlap: the share of communication time during which the"
    " rank also computes (merged intervals)"
)


def section(rows: Sequence[Row], title: str = "Strategies beside what the frameworks do by themselves") -> Section:
    """Makes the section of the strategies, or of the main job, which has no peers."""
    traced = [row for row in rows if "trace" in row]
    steps = without_comparison([row for row in rows if "trace" not in row])
    parts = [
        step_figure("One training step by strategy", [row for row in steps if is_step(row)]),
        step_table("Steps by strategy", steps),
        *trace_figures(rows),
        Table("A step as the profilers see it", TRACE_COLUMNS, traced, _TRACE_NOTE),
    ]
    sentences = [
        *step_sentences(steps),
        *_beside_peers(steps),
        *trace_sentences(rows),
        *between_frameworks(rows),
        few_rounds(steps),
        left_out(steps),
    ]
    return Section(title, list(filter(None, sentences)), parts, strategies_beside(steps), _notes(timed(steps)))


def _notes(steps: Sequence[Row]) -> list[str]:
    notes = [how_ranks_run(steps), *_NOTES] if steps else []
    notes += [_IN_A_ROW] if any("in_a_row_ms" in row for row in steps) else []
    notes += device_notes(steps)
    notes += [_IN_TURNS] if any(row.get("in_turns") for row in steps) else []
    notes += [_UNLIKE] if len({text(row, "framework") for row in steps}) > 1 else []
    for row in steps[:1]:
        if (first := number(row, "first_loss")) is not None:
            bound = number(row, "tolerance")
            at_most = (
                f", at most {bound:.0e}" if bound else ", without a bound: random tokens leave gradients of the size"
            )
            at_most += "" if bound else " of their rounding"
            notes.append(f"loss: of the last batch, {first:.3f} nats at first; max diff: after the last step{at_most}")
    return notes


def _beside_peers(rows: Sequence[Row]) -> list[str]:
    """Sentences for each group: its shortest step compared with those of the framework's own data parallelism."""
    said = []
    for each, members in by(rows, group).items():
        ordered = timed(members)
        ours = [row for row in ordered if text(row, "strategy") not in _PEERS]
        peers = [row for row in ordered if text(row, "strategy") in _PEERS]
        if ours and peers:
            said.append(f"{each}: the step of {name(ours[0])} {_beside(ours[0], peers)}.")
    return said


def _beside(ours: Row, peers: Sequence[Row]) -> str:
    """A sentence on how a step compares with others, and which differences are within their intervals."""
    told, untold = [], []
    for row in peers:
        ratio = ratio_of(ours, row)
        if ratio is None:
            untold.append(f"that of {name(row)} (no spread is known)")
        elif ratio.is_told:
            told.append(f"{ratio.times} that of {name(row)} ({ratio.interval})")
        else:
            untold.append(f"that of {name(row)} ({ratio.times}, {ratio.interval})")
    said = [f"takes {listed(told)}"] if told else []
    said += [f"cannot be told from {listed(untold)}"] if untold else []
    return " and ".join(said)
