"""Bucket sizes: steps by bucket cap, and the caps that are as good as the best.

All caps train in interleaved rounds, with and without communication. ``python -m jaxddp inspect`` simulates
them on GPUs that are not here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from .benchmark import Benchmark, Case, Options
from .render import CHECK, Column, Row, by, new_figure, whiskers
from .strategies import COLUMNS, NOTES, cases_of, measure_steps
from .timing import compare
from .training.setup import OPTIONS, QUICK_MODEL, StrategySpec, make_setup

CAPS_MB, QUICK_CAPS_MB = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 1000.0), (1.0, 5.0, 1000.0)
BEST = "Best caps"


def cases(options: Options) -> list[Case]:
    """One case, or one for each framework where they do not share processes."""
    caps = options.bucket_mb or (QUICK_CAPS_MB if options.quick else CAPS_MB)
    setup = make_setup(
        options, model=QUICK_MODEL if options.quick else "lm_9m", batch_size=4 if options.quick else 8,
        num_steps=4 if options.quick else 12, num_warmup=1 if options.quick else 2,
    )  # fmt: skip
    specs = tuple(StrategySpec("bucketed", cap) for cap in sorted(set(caps)))
    return cases_of(replace(setup, strategies={"jaxddp": specs, "torchref": specs}))


def best_caps(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each framework: the best cap, and those that noise does not tell from it."""
    for (framework,), some in by([row for row in rows if row["check"] == "ok"], "framework").items():
        best = min(some, key=lambda row: row["median_ms"])
        as_good = [row for row in some if compare(row["rounds_ms"], best["rounds_ms"], paired=True).low <= 1]
        yield {
            "table": BEST, "framework": framework, "label": best["label"], "median_ms": best["median_ms"],
            "as_good": ", ".join(f"{row['bucket_mb']:g}" for row in as_good), "check": "ok",
        }  # fmt: skip


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """Steps by cap."""
    measured = by([row for row in rows if row.get("rounds_ms")], "framework")
    figure, axes = new_figure("One training step by bucket cap", 1, len(measured))
    for axis, ((framework,), some) in zip(axes[0], measured.items(), strict=True):
        caps, times = [row["bucket_mb"] for row in some], [row["median_ms"] for row in some]
        ends = whiskers(times, [row["p10_ms"] for row in some], [row["p90_ms"] for row in some])
        axis.errorbar(caps, times, yerr=ends, marker="o", capsize=3, color="#4477aa", label="p10 to p90")
        axis.set(title=framework, xscale="log", xlabel="bucket cap, MiB", ylabel="ms")
        axis.legend()
    yield figure


BENCHMARK = Benchmark(
    "buckets", "one training step by bucket cap, in both frameworks", (*OPTIONS, "bucket_mb"), cases, measure_steps,
    {
        "One training step by bucket cap": COLUMNS,
        BEST: (
            Column("framework"), Column("best cap", "label"), Column("step", "median_ms", "ms"),
            Column("as good within noise", "as_good", "MiB"), CHECK,
        ),
    },
    plot, best_caps, NOTES[:3],
)  # fmt: skip
