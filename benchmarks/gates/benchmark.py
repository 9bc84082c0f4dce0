"""Gates: no strategy may cost more than what it replaces, measured in the same run.

A gate is a ratio of medians with a 95 % interval, see ``ratios.py``. Within a framework the two take turns; of two
frameworks, whose processes cannot, each has its own rounds, and is not judged where a machine was not all there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..harness.options import Options
from ..harness.ranks import chosen_ranks
from ..harness.ratios import Gate as Gate
from ..harness.ratios import compare as compare
from ..harness.run import NOT_RUN, Run, holds
from ..harness.steal_time import in_words
from ..harness.tables import NOTHING, Column, markdown_table, terminal_table, time_cell, value, write_markdown
from ..strategies.benchmark import BATCH_SIZE, NUM_RANKS, check_memory, make_setup
from ..training.frameworks import BETWEEN, measure_both
from ..training.measure import PEERS, Setup, StrategySpec
from ..training.steps import STEP_COLUMNS, how_ranks_run, label

MODEL, NUM_ROUNDS, MIN_ROUNDS, NUM_WARMUP = "lm_9m", 20, 10, 3
BUCKETED, ZERO1, ZERO2 = (StrategySpec(name, 25.0) for name in ("bucketed", "zero1", "zero2"))
JIT = StrategySpec("jit")
# Its caps as torchref's BucketedDDP has them.
DDP = StrategySpec("DistributedDataParallel", 25.0)
STRATEGIES = {
    "jaxddp": (StrategySpec("flat"), StrategySpec("overlapped"), BUCKETED, ZERO1, ZERO2, JIT),
    "torchref": (BUCKETED, DDP),
}
BEST = "jaxddp's best strategy"
# Name, what of which framework over what of which, and the limit.
_GATES = (
    ("jaxddp bucketed / jit with replicated parameters", ("jaxddp", BUCKETED), ("jaxddp", JIT), 1.05),
    ("jaxddp zero1 / jaxddp bucketed", ("jaxddp", ZERO1), ("jaxddp", BUCKETED), 1.05),
    ("jaxddp zero2 / jaxddp bucketed", ("jaxddp", ZERO2), ("jaxddp", BUCKETED), 1.05),
    ("torchref bucketed / DistributedDataParallel", ("torchref", BUCKETED), ("torchref", DDP), 1.05),
    (f"{BEST} / DistributedDataParallel", ("jaxddp", None), ("torchref", DDP), 1.00),
)
_COLUMNS = (
    Column("gate", "", lambda row: row["name"], is_text=True),
    Column("ours", "ms", time_cell("ours_ms")),
    Column("p10-p90", "ms", time_cell("ours_p10_ms", "ours_p90_ms")),
    Column("peer", "ms", time_cell("theirs_ms")),
    Column("p10-p90", "ms", time_cell("theirs_p10_ms", "theirs_p90_ms")),
    Column("ratio", "", value("ratio", ".3f")),
    Column("95 % interval", "", lambda row: f"{row['low']:.3f}-{row['high']:.3f}" if "low" in row else NOTHING),
    Column("limit", "", value("limit", ".2f")),
    Column("check", "", lambda row: row["check"], is_text=True),
)


def describe(options: Options) -> tuple[Setup, str]:
    """Describes what is compared.

    Args:
        options: Ranks (2), rounds (20, at least 10), the batch size (8), a model (lm_9m), and text for one of bytes.

    Returns:
        The setup, and its description in a line.

    Raises:
        ValueError: If there are too few rounds for an interval, or the batch cannot be split.
    """
    num_steps = options.steps or (MIN_ROUNDS if options.quick else NUM_ROUNDS)
    if num_steps < MIN_ROUNDS:
        raise ValueError(f"steps (={num_steps}) must be at least {MIN_ROUNDS} rounds, or the interval means nothing")
    batch_size = options.batch_size or BATCH_SIZE
    ranks = chosen_ranks(options.ranks, NUM_RANKS, options.on, batch_size=batch_size)
    model = options.model or MODEL
    setup, described = make_setup(model, ranks, num_steps, batch_size, data=options.data, num_warmup=NUM_WARMUP)
    setup = replace(setup, strategies=STRATEGIES["jaxddp"], with_baselines=False)
    check_memory(setup)
    return setup, described


def run(this: Run, setup: Setup) -> bool:
    """Runs both frameworks against their peers, prints the tables and fills the folder.

    Args:
        this: The folder, console and rows of this run.
        setup: What to train.

    Returns:
        Whether every gate holds.
    """
    measured = measure_both(this, {name: replace(setup, strategies=specs) for name, specs in STRATEGIES.items()})
    this.part("gates", lambda: gate_rows(measured), is_derived=True)
    show(this)
    return holds(this.rows)


def gate_rows(measured: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compares what was measured.

    Args:
        measured: Rows of training steps.

    Yields:
        A row for each gate; one of whose sides is wrong or missing is not run, and one whose sides did not take turns
        is not judged if this machine's host kept much of its time from either.
    """
    sound = [row for row in measured if row["check"] == "ok" and "median_ms" in row]
    for name, ours, theirs, limit in _GATES:
        one, other = _find(sound, *ours), _find(sound, *theirs)
        if one is None or other is None:
            yield {"name": name, "limit": limit, "check": f"{NOT_RUN}one of the two was not measured, or is wrong"}
            continue
        paired = ours[0] == theirs[0]
        gate = compare(name, _seconds(one), _seconds(other), limit, paired=paired)
        which = {"ours": label(one), "theirs": label(other), "is_interleaved": paired}
        for side, row in (("ours", one), ("theirs", other)):
            which |= {f"{side}_{spread}_ms": row[f"{spread}_ms"] for spread in ("p10", "p90")}
        said = "" if paired else in_words(max(row.get("stolen_share", 0.0) for row in (one, other)))
        judged = "ok" if gate.holds else "MISSED"
        yield asdict(gate) | which | {"check": f"not judged: {said}" if said else judged}


def _seconds(row: Mapping[str, Any]) -> list[float]:
    return [1e-3 * time for time in row["rounds_ms"]]


def _find(rows: Sequence[Mapping[str, Any]], framework: str, spec: StrategySpec | None) -> Mapping[str, Any] | None:
    """The row of a strategy, or of the fastest that is no peer; None if there is none."""
    of_framework = [row for row in rows if row["framework"] == framework]
    if spec is not None:
        return next((row for row in of_framework if label(row) == spec.label), None)
    ours = [row for row in of_framework if row["strategy"] not in PEERS[framework]]
    return min(ours, key=lambda row: row["median_ms"], default=None)


def show(this: Run) -> None:
    """Makes the tables and notes of a run's rows."""
    gates = [row for row in this.rows if row["part"] == "gates"]
    steps = [row for row in this.rows if row["part"] not in ("gates", BETWEEN)]
    notes = [
        how_ranks_run([row for row in steps if "median_ms" in row]),
        *_in_words(gates),
        "a gate holds if the lower end of its interval is within the limit",
    ]
    this.console.print()
    this.console.print(terminal_table(steps, STEP_COLUMNS, "steps"))
    this.console.print(terminal_table(gates, _COLUMNS, "ratios of median step times", has_groups=False))
    for note in notes:
        this.console.print(f"[dim]{note}[/dim]", soft_wrap=True)
    tables = [markdown_table(gates, _COLUMNS), markdown_table(steps, STEP_COLUMNS)]
    write_markdown(this.folder, tables, notes)
    this.console.print(f"\nwritten to {this.folder}: table.md, metrics.jsonl", soft_wrap=True)


def _in_words(gates: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in gates:
        if "ratio" in row:
            interval = f"95 % interval {row['low']:.3f} to {row['high']:.3f}"
            rounds = f"{row['num_rounds']} rounds{'' if row['is_interleaved'] else ' each, not interleaved'}"
            sides = f"{row['ours']} / {row['theirs']}"
            yield f"{row['name']}: {row['ratio']:.3f}, {interval}, over {rounds}; {sides} ({row['check']})"
