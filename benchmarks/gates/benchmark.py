"""Gates: no strategy may cost more than what it replaces, measured in the same run.

A gate is a ratio with a 95 % interval, see ``ratios.py``. Both sides are timed in interleaved rounds, two frameworks in
turns, and compared round by round. Where they cannot be, as in a job, a gate across them compares medians, and is not
judged if steal time was high.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..harness.options import Options
from ..harness.ranks import chosen_ranks
from ..harness.ratios import NOT_JUDGED, compare
from ..harness.run import NOT_RUN, Run
from ..harness.steal_time import in_words
from ..report.section import show
from ..report.steps import name as label
from ..strategies.benchmark import BATCH_SIZE, NUM_RANKS, in_turns, make_setup
from ..training.frameworks import measure_both
from ..training.measure import PEERS, StrategySpec, TrainingSetup
from .section import section

MODEL, NUM_ROUNDS, MIN_ROUNDS, NUM_WARMUP = "lm_9m", 20, 10, 3
BUCKETED, ZERO1, ZERO2 = (StrategySpec(name, 25.0) for name in ("bucketed", "zero1", "zero2"))
JIT = StrategySpec("jit")
# With the caps of torchref's BucketedDDP.
DDP = StrategySpec("DistributedDataParallel", 25.0)
STRATEGIES = {
    "jaxddp": (StrategySpec("flat"), StrategySpec("overlapped"), BUCKETED, ZERO1, ZERO2, JIT),
    "torchref": (BUCKETED, DDP),
}
BEST = "jaxddp's best strategy"
# Name, numerator and denominator as (framework, strategy), and limit.
_GATES = (
    ("jaxddp bucketed / jit with replicated parameters", ("jaxddp", BUCKETED), ("jaxddp", JIT), 1.05),
    ("jaxddp zero1 / jaxddp bucketed", ("jaxddp", ZERO1), ("jaxddp", BUCKETED), 1.05),
    ("jaxddp zero2 / jaxddp bucketed", ("jaxddp", ZERO2), ("jaxddp", BUCKETED), 1.05),
    ("torchref bucketed / DistributedDataParallel", ("torchref", BUCKETED), ("torchref", DDP), 1.05),
    (f"{BEST} / DistributedDataParallel", ("jaxddp", None), ("torchref", DDP), 1.00),
)


def describe(options: Options) -> tuple[TrainingSetup, str]:
    """Describes what is compared.

    Defaults: 2 ranks, 20 rounds (at least 10), a batch of 8, the model lm_9m.

    Raises:
        ValueError: If there are too few rounds for an interval, or the batch cannot be split.
    """
    num_steps = options.steps or (MIN_ROUNDS if options.quick else NUM_ROUNDS)
    if num_steps < MIN_ROUNDS:
        raise ValueError(f"steps (={num_steps}) must be at least {MIN_ROUNDS} rounds, or the interval means nothing")
    batch_size = options.batch_size or BATCH_SIZE
    ranks = chosen_ranks(options.ranks, NUM_RANKS, options.on, batch_size=batch_size)
    model = options.model or MODEL
    setup, described = make_setup(
        model, ranks, num_steps, batch_size, data=options.data, num_warmup=NUM_WARMUP, dtype=options.dtype or "f32"
    )
    return in_turns(replace(setup, strategies=STRATEGIES["jaxddp"], with_baselines=False)), described


def run(this: Run, setup: TrainingSetup) -> bool:
    """Runs both frameworks against their peers, prints the tables and writes the folder."""
    measured = measure_both(this, {name: replace(setup, strategies=specs) for name, specs in STRATEGIES.items()})
    this.part("gates", lambda: gate_rows(measured), is_derived=True)
    return show(this, section(this.rows))


def gate_rows(measured: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Makes a row for each gate.

    A gate is not run if a side is wrong or missing, and not judged if its sides were not interleaved and steal time was
    high.
    """
    sound = [row for row in measured if row["check"] == "ok" and "median_ms" in row]
    for name, ours, theirs, limit in _GATES:
        one, other = _find(sound, *ours), _find(sound, *theirs)
        if one is None or other is None:
            yield {"name": name, "limit": limit, "check": f"{NOT_RUN}one of the two was not measured, or is wrong"}
            continue
        paired = ours[0] == theirs[0] or all(row.get("in_turns") for row in (one, other))
        gate = compare(name, _seconds(one), _seconds(other), limit, paired=paired)
        which = {"ours": label(one), "theirs": label(other), "is_interleaved": paired}
        for side, row in (("ours", one), ("theirs", other)):
            which |= {f"{side}_{spread}_ms": row[f"{spread}_ms"] for spread in ("p10", "p90")}
        said = "" if paired else in_words(max(row.get("stolen_share", 0.0) for row in (one, other)))
        yield asdict(gate) | which | {"check": f"{NOT_JUDGED}{said}" if said else gate.verdict}


def _seconds(row: Mapping[str, Any]) -> list[float]:
    return [1e-3 * time for time in row["rounds_ms"]]


def _find(rows: Sequence[Mapping[str, Any]], framework: str, spec: StrategySpec | None) -> Mapping[str, Any] | None:
    """The row of a strategy, or of the fastest that is not a peer; None if there is none."""
    of_framework = [row for row in rows if row["framework"] == framework]
    if spec is not None:
        return next((row for row in of_framework if label(row) == spec.label), None)
    ours = [row for row in of_framework if row["strategy"] not in PEERS[framework]]
    return min(ours, key=lambda row: row["median_ms"], default=None)
