"""Gates: no strategy may cost more than what it replaces, measured in the same run.

A gate is a ratio of medians over interleaved rounds with a 95 % interval, and holds if the interval's lower end does:
on a noisy machine the same program against itself gives ratios from 0.95 to 1.10, so a single ratio proves nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxddp.data import RandomTokens

from .main_job import check_batch_size, run_jax, run_torch
from .measure import Setup, StrategySpec
from .results import commit, describe_machine, make_rows, write_rows

MODEL, VOCAB, CONTEXT = "lm_9m", 10000, 128
BUCKETED = StrategySpec("bucketed", 25.0)
ZERO1 = StrategySpec("zero1", 25.0)
NUM_RESAMPLES = 4000


@dataclass(frozen=True)
class Gate:
    """A ratio of step times and the most that it may be."""

    name: str
    ratio: float
    low: float
    high: float
    limit: float
    ours_ms: float
    theirs_ms: float
    num_rounds: int

    @property
    def in_words(self) -> str:
        """The ratio with its interval."""
        return f"{self.ratio:.3f}, 95 % interval {self.low:.3f} to {self.high:.3f}, over {self.num_rounds} rounds"

    @property
    def holds(self) -> bool:
        """Whether the lower end of the interval is within the limit."""
        return self.low <= self.limit


def compare(name: str, ours: list[float], theirs: list[float], limit: float) -> Gate:
    """Compares two variants that were timed in the same rounds.

    Args:
        name: Of the gate.
        ours: Seconds by round.
        theirs: Seconds by round, of the peer.
        limit: The most that median(ours) / median(theirs) may be.

    Returns:
        The gate, with the 95 % interval of the ratio from resampled rounds.
    """
    pairs = np.asarray([ours, theirs])
    chosen = np.random.default_rng(0).integers(0, len(ours), (NUM_RESAMPLES, len(ours)))
    resampled = np.median(pairs[:, chosen], axis=2)
    low, high = np.percentile(resampled[0] / resampled[1], [2.5, 97.5]).tolist()
    median_ours, median_theirs = np.median(pairs, axis=1).tolist()
    return Gate(name, median_ours / median_theirs, low, high, limit, median_ours * 1e3, median_theirs * 1e3, len(ours))


def gates_setup(*, num_ranks: int, num_steps: int, batch_size: int) -> tuple[Setup, str]:
    """Describes what is compared.

    Args:
        num_ranks: Ranks in each framework.
        num_steps: Timed rounds, at least 10.
        batch_size: Sequences of the global batch.

    Returns:
        The setup, and its description in a line.

    Raises:
        ValueError: If there are too few rounds for an interval, or the batch cannot be split.
    """
    if num_steps < 10:
        raise ValueError(f"steps (={num_steps}) must be at least 10 rounds, or the interval means nothing")
    check_batch_size(batch_size, num_ranks)
    tokens, num_warmup = RandomTokens(VOCAB, CONTEXT), 3
    batches = tuple(tokens.batch(step, batch_size) for step in range(num_warmup + num_steps))
    described = (
        f"{MODEL}, vocabulary {VOCAB}, random tokens: {num_warmup} + {num_steps} interleaved rounds of"
        f" {batch_size} x {CONTEXT} tokens, AdamW, {num_ranks} ranks"
    )
    setup = Setup(MODEL, (BUCKETED, ZERO1), num_ranks, batches, num_warmup, with_baselines=False, with_peer=True)
    return setup, described


def run_gates(folder: Path, console: Console, setup: Setup) -> bool:
    """Runs both frameworks against their peers, prints the table and fills the folder.

    Args:
        folder: Of this run.
        console: Where to print.
        setup: What to train.

    Returns:
        Whether every gate holds.
    """
    in_torch = replace(setup, strategies=(BUCKETED,))
    ours = run_jax(setup, console)
    theirs = run_torch(in_torch, ours.weights, console)
    jax_s, torch_s = ({label: one.seconds for label, one in side.measured.items()} for side in (ours, theirs))
    gates = [
        compare("jaxddp bucketed / jit with replicated parameters", jax_s[BUCKETED.label], jax_s["peer"], 1.05),
        compare("jaxddp zero1 / jaxddp bucketed", jax_s[ZERO1.label], jax_s[BUCKETED.label], 1.05),
        compare("torchref bucketed / DistributedDataParallel", torch_s[BUCKETED.label], torch_s["peer"], 1.10),
    ]
    # No gate, and not interleaved: two processes cannot take turns step by step.
    name = "for information: jaxddp bucketed / DistributedDataParallel"
    across = compare(name, jax_s[BUCKETED.label], torch_s["peer"], float("inf"))
    console.print()
    console.print(_table([*gates, across]))
    record = {"benchmark": "gates", "model": MODEL, "commit": commit(), **describe_machine()}
    record |= {"versions": ours.versions | theirs.versions, "ranks": [ours.ranks, theirs.ranks]}
    # No bound on weights: random tokens leave most embedding rows gradients of the size of their rounding, which Adam
    # turns into steps of full size. Losses and norms of all rounds were seen within 2e-5 of single-process training's.
    rows = [
        *make_rows("gates", "jaxddp", setup, ours, None, must_learn=False),
        *make_rows("gates", "torchref", in_torch, theirs, None, must_learn=False),
    ]
    write_rows(folder, rows, [f"{gate.name}: {gate.in_words} ({_check(gate)})" for gate in [*gates, across]])
    for row in rows:
        console.print(
            f"{row.framework} {row.strategy}: plan, losses and gradient norms against one process: {row.check}"
        )
    with (folder / "metrics.jsonl").open("a") as lines:
        for gate in [*gates, across]:
            lines.write(json.dumps(record | asdict(gate) | {"check": _check(gate)}) + "\n")
    console.print(f"written to {folder}: table.md, metrics.jsonl", soft_wrap=True)
    return all(gate.holds for gate in gates) and all(row.check == "ok" for row in rows)


def _check(gate: Gate) -> str:
    return "-" if gate.limit == float("inf") else "ok" if gate.holds else "MISSED"


def _table(gates: list[Gate]) -> Table:
    table = Table(title="ratios of median step times", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, unit in (
        ("gate", ""),
        ("ours", "ms"),
        ("peer", "ms"),
        ("ratio", ""),
        ("95 % interval", ""),
        ("limit", ""),
    ):
        table.add_column(f"{name}\n[dim]{unit}[/dim]", justify="left" if name == "gate" else "right", no_wrap=True)
    table.add_column("check\n", no_wrap=True)
    for gate in gates:
        limit = "-" if gate.limit == float("inf") else f"{gate.limit:.2f}"
        table.add_row(
            gate.name, f"{gate.ours_ms:.0f}", f"{gate.theirs_ms:.0f}", f"{gate.ratio:.3f}",
            f"{gate.low:.3f}-{gate.high:.3f}", limit, _check(gate),
            style=None if gate.holds else "bold red",
        )  # fmt: skip
    return table
