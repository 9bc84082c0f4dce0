"""The main job and the strategies: what a step takes, and how much of it is communication that nothing hides."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.figure import Figure
from ..report.ratio import ratio_of
from ..report.section import Section
from ..report.sentences import few_rounds, left_out, timed
from ..report.source import strategies_beside
from ..report.steps import group, is_step, name, step_figure, step_sentences, step_table
from ..report.table import Table
from ..report.values import Row, by, listed, text
from ..traces.section import trace_figures, trace_sentences
from ..training.measure import PEERS

_PEERS = frozenset(name for names in PEERS.values() for name in names)


def main_section(rows: Sequence[Row]) -> Section:
    """Makes the main job's section."""
    return _section("The main job: every strategy in both frameworks", rows)


def strategies_section(rows: Sequence[Row]) -> Section:
    """Makes the section of the strategies beside what the frameworks do by themselves."""
    return _section("Strategies beside what the frameworks do by themselves", rows)


def _section(title: str, rows: Sequence[Row]) -> Section:
    steps = [row for row in rows if "trace" not in row]
    parts: list[Figure | Table | None] = [
        step_figure("One training step by strategy", [row for row in steps if is_step(row)]),
        step_table("Steps by strategy", steps),
        *trace_figures(rows),
    ]
    sentences = [
        *step_sentences(steps),
        *_beside_peers(steps),
        *trace_sentences(rows),
        few_rounds(steps),
        left_out(steps),
    ]
    return Section(title, [one for one in sentences if one], [part for part in parts if part], strategies_beside(steps))


def _beside_peers(rows: Sequence[Row]) -> list[str]:
    """Says for each group how its shortest step compares to those of the framework itself."""
    said = []
    for each, members in by(rows, group).items():
        ordered = timed(members)
        ours = [row for row in ordered if text(row, "strategy") not in _PEERS]
        peers = [row for row in ordered if text(row, "strategy") in _PEERS]
        if ours and peers:
            said.append(f"{each}: the step of {name(ours[0])} {_beside(ours[0], peers)}.")
    return said


def _beside(ours: Row, peers: Sequence[Row]) -> str:
    """Says by how much a step differs from others, and from which of them no interval tells it."""
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
