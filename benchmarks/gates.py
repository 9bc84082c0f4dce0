"""Gates: no strategy may cost more than what it replaces, measured in the same run.

A gate is a ratio of step times with a 95 % interval (``timing.py``) and a limit. Both sides take turns in the same
rounds, also where they are of two frameworks; otherwise a gate is not judged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .benchmark import NOT_RUN, Benchmark, Case, Options
from .render import CHECK, Column, Row, interval, is_sound
from .strategies import COLUMNS, NOTES, cases_of, measure_steps, plot_steps
from .timing import compare
from .training.setup import OPTIONS, PEERS, make_setup, spec_of

MODEL, BATCH, NUM_ROUNDS, MIN_ROUNDS, NUM_WARMUP = "lm_9m", 8, 20, 10, 3
DDP = "DistributedDataParallel"
STRATEGIES = {
    "jaxddp": ("flat", "overlapped", "bucketed", "zero1", "zero2", "jit"), "torchref": ("bucketed", DDP),
}  # fmt: skip
# Framework and strategy of numerator and denominator, and limit; without a strategy it is the fastest of ours.
_GATES = (
    ("jaxddp bucketed", "jaxddp jit", 1.05),
    ("jaxddp zero1", "jaxddp bucketed", 1.05),
    ("jaxddp zero2", "jaxddp bucketed", 1.05),
    ("torchref bucketed", f"torchref {DDP}", 1.05),
    ("jaxddp", f"torchref {DDP}", 1.00),
)
GATES = "Ratios of step times and their limits"


def cases(options: Options) -> list[Case]:
    """One: all rounds of both frameworks."""
    num_steps = options.steps or (MIN_ROUNDS if options.quick else NUM_ROUNDS)
    if num_steps < MIN_ROUNDS:
        raise ValueError(f"steps (={num_steps}) must be at least {MIN_ROUNDS} rounds, or the interval means nothing")
    setup = make_setup(options, model=MODEL, batch_size=BATCH, num_steps=num_steps, num_warmup=NUM_WARMUP)
    specs = {framework: tuple(spec_of(name, setup.model) for name in names) for framework, names in STRATEGIES.items()}
    return cases_of(replace(setup, strategies=specs, with_baselines=False))


def judge(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each gate."""
    sound = [row for row in rows if is_sound(row) and row.get("median_ms")]
    for ours, theirs, limit in _GATES:
        row: dict[str, Any] = {"table": GATES, "name": f"{ours} / {theirs}", "limit": limit}
        one, other = _find(sound, ours), _find(sound, theirs)
        if one is None or other is None:
            yield row | {"check": f"{NOT_RUN}one of the two was not measured, or is wrong"}
            continue
        paired = one["case"] == other["case"]
        found = compare(one["rounds_ms"], other["rounds_ms"], paired=paired)
        row |= found._asdict() | {"ours": one["label"], "theirs": other["label"], "num_rounds": one["num_rounds"]}
        yield row | {"check": found.verdict(limit) if paired else "not judged: the two did not take turns"}


def _find(rows: Sequence[Row], wanted: str) -> Row | None:
    """The row of a strategy, or of the fastest that is not a peer; None if there is none."""
    framework, _, name = wanted.partition(" ")
    some = [row for row in rows if row["framework"] == framework]
    some = [row for row in some if (row["strategy"] == name if name else row["strategy"] not in PEERS[framework])]
    return min(some, key=lambda row: row["median_ms"], default=None)


_COLUMNS = (
    Column("gate", "name"),
    Column("ratio", form="{:.3f}".format),
    interval("95 % interval", "low", "high", form="{:.3f}".format),
    Column("limit", form="{:.2f}".format),
    Column("rounds", "num_rounds"),
    Column("ours"),
    Column("theirs"),
    CHECK,
)
BENCHMARK = Benchmark(
    "gates", "what may not cost more than what: jit, DistributedDataParallel, ZeRO-1", OPTIONS, cases, measure_steps,
    {"The steps behind the ratios": COLUMNS, GATES: _COLUMNS}, plot_steps, judge,
    ("ratio: the median of the rounds' ratios; a gate is missed if all of its interval is beyond the limit, and not"
     " judged if the limit lies between, or the interval is wider than a fifth of it", *NOTES[:3]),
)  # fmt: skip
