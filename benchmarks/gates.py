"""Gates: no strategy may cost more than what it replaces, measured in the same run.

A gate is a ratio of step times with a 95 % interval (``timing.py``) and a limit. Both sides take turns in the same
rounds, also where they are of two frameworks; otherwise a gate is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from .benchmark import NOT_RUN, Benchmark, Case, Options
from .render import CHECK, Column, Row, interval, is_sound, new_figure, whiskers
from .strategies import BETWEEN, BETWEEN_COLUMNS, COLUMNS, NOTES, cases_of, measure_steps, plot_steps
from .timing import compare
from .training.rank import compare_frameworks
from .training.setup import OPTIONS, PEERS, StrategySpec, make_setup

MODEL, BATCH, NUM_ROUNDS, MIN_ROUNDS, NUM_WARMUP = "lm_9m", 8, 20, 10, 3
BUCKETED, ZERO1, ZERO2, DDP = (
    StrategySpec(name, 25.0) for name in ("bucketed", "zero1", "zero2", "DistributedDataParallel")
)
JIT, FLAT, OVERLAPPED = (StrategySpec(name) for name in ("jit", "flat", "overlapped"))
SPECS = {"jaxddp": (FLAT, OVERLAPPED, BUCKETED, ZERO1, ZERO2, JIT), "torchref": (BUCKETED, DDP)}
# Name, numerator and denominator as (framework, strategy), and limit; without a strategy it is the fastest of ours.
_GATES = (
    ("jaxddp bucketed / jit with replicated parameters", ("jaxddp", BUCKETED), ("jaxddp", JIT), 1.05),
    ("jaxddp zero1 / jaxddp bucketed", ("jaxddp", ZERO1), ("jaxddp", BUCKETED), 1.05),
    ("jaxddp zero2 / jaxddp bucketed", ("jaxddp", ZERO2), ("jaxddp", BUCKETED), 1.05),
    ("torchref bucketed / DistributedDataParallel", ("torchref", BUCKETED), ("torchref", DDP), 1.05),
    ("jaxddp's best strategy / DistributedDataParallel", ("jaxddp", None), ("torchref", DDP), 1.00),
)
GATES = "Ratios of step times and their limits"


def cases(options: Options) -> list[Case]:
    """One: all rounds of both frameworks."""
    num_steps = options.steps or (MIN_ROUNDS if options.quick else NUM_ROUNDS)
    if num_steps < MIN_ROUNDS:
        raise ValueError(f"steps (={num_steps}) must be at least {MIN_ROUNDS} rounds, or the interval means nothing")
    setup = make_setup(
        options, model=options.model or MODEL, batch_size=BATCH, num_steps=num_steps, num_warmup=NUM_WARMUP
    )
    return cases_of(replace(setup, strategies=SPECS, with_baselines=False))


def judge(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each gate, and that of the two frameworks."""
    sound = [row for row in rows if is_sound(row) and row.get("median_ms")]
    for name, ours, theirs, limit in _GATES:
        row: dict[str, Any] = {"table": GATES, "name": name, "limit": limit}
        one, other = _find(sound, *ours), _find(sound, *theirs)
        if one is None or other is None:
            yield row | {"check": f"{NOT_RUN}one of the two was not measured, or is wrong"}
            continue
        paired = one["case"] == other["case"]
        found = compare(one["rounds_ms"], other["rounds_ms"], paired=paired)
        row |= found._asdict() | {"ours": one["label"], "theirs": other["label"], "num_rounds": one["num_rounds"]}
        verdict = found.verdict(limit) if paired else "not judged: the two did not take turns"
        yield row | {"ours_ms": one["median_ms"], "theirs_ms": other["median_ms"], "check": verdict}
    yield from compare_frameworks(rows)


def _find(rows: Sequence[Row], framework: str, spec: StrategySpec | None) -> Row | None:
    """The row of a strategy, or of the fastest that is not a peer; None if there is none."""
    of_framework = [row for row in rows if row["framework"] == framework]
    if spec is not None:
        return next((row for row in of_framework if row["label"] == spec.label), None)
    ours = [row for row in of_framework if row["strategy"] not in PEERS[framework]]
    return min(ours, key=lambda row: row["median_ms"], default=None)


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """Intervals beside their limits, and the steps behind them."""
    gates = [row for row in rows if row.get("ratio")][::-1]
    if gates:
        figure, axes = new_figure(GATES, height=3)
        axis, names, ratios = axes[0][0], [row["name"] for row in gates], [row["ratio"] for row in gates]
        ends = whiskers(ratios, [row["low"] for row in gates], [row["high"] for row in gates])
        axis.errorbar(ratios, names, xerr=ends, fmt="o", color="#4477aa", capsize=4, label="ratio, 95 % interval")
        axis.plot([row["limit"] for row in gates], names, "|", color="#cc3311", markersize=24, label="limit")
        axis.legend()
        yield figure
    yield from plot_steps(rows)


_COLUMNS = (
    Column("gate", "name"),
    Column("ratio", form="{:.3f}".format),
    interval("95 % interval", "low", "high", form="{:.3f}".format),
    Column("limit", form="{:.2f}".format),
    Column("rounds", "num_rounds"),
    Column("ours"),
    Column("step", "ours_ms", "ms"),
    Column("theirs"),
    Column("step", "theirs_ms", "ms"),
    CHECK,
)
BENCHMARK = Benchmark(
    "gates", "what may not cost more than what: jit, DistributedDataParallel, ZeRO-1", OPTIONS, cases, measure_steps,
    {"The steps behind the ratios": COLUMNS, GATES: _COLUMNS, BETWEEN: BETWEEN_COLUMNS}, plot, judge,
    ("ratio: the median of the rounds' ratios; a gate is missed if all of its interval is beyond the limit, and not"
     " judged if the limit lies between, or the interval is wider than a fifth of it", *NOTES[:3]),
)  # fmt: skip
