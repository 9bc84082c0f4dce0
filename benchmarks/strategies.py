"""Every strategy in both frameworks: the main job, and the same beside what the frameworks do by themselves.

All runs of a framework start from the same weights and see the same batches, so all must end where single-process
training ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jaxddp import STRATEGIES

from .benchmark import Benchmark, Case, Options, Say
from .ranks import choose_ranks
from .render import CHECK, STEP, Column, Row, by, counts, interval, new_figure, percent, signed, whiskers
from .training.rank import train
from .training.setup import BYTE_MODEL, NAMES, OPTIONS, QUICK_MODEL, TrainingSetup, in_words, make_setup, strategies_of

MAIN_BATCH, BATCH, STEPS, QUICK_STEPS = 4, 8, 10, 4


COLUMNS = (
    Column("strategy", lambda row: row.get("label") or row.get("case")),
    Column("framework"),
    Column("backend"),
    Column("planned", form=counts),
    Column("compiled", form=counts),
    Column("loss", "loss", "nats", "{:.3f}".format),
    Column("max diff", "max_weight_difference", form="{:.1e}".format),
    *STEP,
    Column("exposed", "exposed_ms", "ms", signed),
    interval("p10 to p90", "exposed_p10_ms", "exposed_p90_ms", "ms", signed),
    Column(
        "exposed", lambda row: row.get("exposed_ms") and row["exposed_ms"] / row["median_ms"], "of the step", percent
    ),
    CHECK,
)
NOTES = (
    "step: median of the slowest rank over interleaved rounds; exposed: step time less that of the same step without"
    " communication, in the same rounds (of jit: less naive without communication)",
    "compiled: gradient collectives (AR all-reduce, RS reduce-scatter, AG all-gather), of torch those that were issued",
    "max diff: of any weight to single-process training, which check compares; numbers of a row that fails end in !",
    "not the same work in the two frameworks: attention, which XLA compiles from matrix products and a softmax and"
    " torch has as one kernel; the loss, which strategies sum over ranks and torch's peers do not",
)
ONE_RANK = (
    "one rank sends nothing: no exposed communication, no overlap and no difference between strategies can be seen"
    " here, only what each adds to the computation"
)


def cases_of(setup: TrainingSetup) -> list[Case]:
    """A case for each group of frameworks that take turns."""
    return [Case(" and ".join(group.frameworks), group) for group in setup.groups()]


def measure_steps(case: Case, say: Say) -> Iterable[dict[str, Any]]:
    """Rows of a case: trains under the strategies of some frameworks, in processes that they share."""
    setup: TrainingSetup = case.setup
    say(f"{case.name}: {in_words(setup)}")
    notes = [ONE_RANK] if setup.ranks.num == 1 else []
    rows = setup.ranks.run(train, setup, in_jax="jaxddp" in setup.frameworks, say=say)
    return (row | {"notes": notes} for row in rows)


def plot_steps(rows: Sequence[Row]) -> Iterable[Any]:
    """Bars of the steps of each framework: what is exposed, and the rest."""
    steps = by([row for row in rows if row.get("label") and row.get("median_ms")], "framework")
    if not steps:
        return
    most = max(map(len, steps.values()))
    figure, axes = new_figure("One training step by strategy", 1, len(steps), height=1 + 0.35 * most)
    for axis, ((framework,), some) in zip(axes[0], steps.items(), strict=True):
        names, times = [row["label"] for row in some], [row["median_ms"] for row in some]
        hidden = [row["median_ms"] - max(0.0, row.get("exposed_ms") or 0.0) for row in some]
        ends = whiskers(times, [row["p10_ms"] for row in some], [row["p90_ms"] for row in some])
        axis.barh(names, times, color="#ee7733", label="exposed communication")
        axis.barh(names, hidden, color="#4477aa", label="without communication")
        axis.errorbar(times, names, xerr=ends, fmt="none", ecolor="black", capsize=3, label="p10 to p90")
        axis.invert_yaxis()
        axis.set(title=f"{framework}, {some[0]['backend']}, {some[0]['num_ranks']} ranks", xlabel="ms")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    yield figure


def main_cases(options: Options) -> list[Case]:
    """The main job: every strategy, and a model small enough for a few minutes."""
    ranks = choose_ranks(options.ranks, options.on, default=2, on_cpus="simulated")
    steps = QUICK_STEPS if options.quick else STEPS
    setup = make_setup(options, model=QUICK_MODEL, batch_size=MAIN_BATCH, num_steps=steps, ranks=ranks)
    specs = strategies_of(options.strategies or STRATEGIES, setup.model, options.bucket_mb)
    return cases_of(replace(setup, strategies=specs))


def strategies_cases(options: Options) -> list[Case]:
    """Strategies beside the frameworks' own data parallelism; torch.compile, which takes minutes on CPUs, if named."""
    setup = make_setup(
        options, model=QUICK_MODEL if options.quick else BYTE_MODEL, batch_size=BATCH,
        num_steps=QUICK_STEPS if options.quick else STEPS, num_warmup=1 if options.quick else 2,
    )  # fmt: skip
    names = options.strategies or [one for one in NAMES if one != "torch.compile" or setup.ranks.kind == "gpus"]
    return cases_of(replace(setup, strategies=strategies_of(names, setup.model, options.bucket_mb)))


_benchmark = partial(
    Benchmark, options=(*OPTIONS, "strategies", "bucket_mb"), measure=measure_steps,
    columns={"One training step by strategy": COLUMNS}, plot=plot_steps, notes=NOTES,
)  # fmt: skip
MAIN = _benchmark("main", "every strategy in both frameworks", cases=main_cases)
STRATEGIES_BENCHMARK = _benchmark(
    "strategies", "every strategy beside what the frameworks do by themselves: jit, DDP, ZeRO, FSDP2",
    cases=strategies_cases,
)  # fmt: skip
