"""Bucket sizes: measured steps beside the predictions of an in-order pipeline.

All caps train in interleaved rounds, with and without communication, in which forward and backward are also timed
alone, all-reduces of four sizes, and forward and backward beside all-reduces. From these:

    gradient ready   its share of the FLOPs of the traced step, times the time of forward and backward
    bucket sent      o + S / w, fitted to the all-reduces
    both at once     each slowed to a rate fitted to forward and backward beside all-reduces
    step             the step without communication + what the pipeline leaves over after the last gradient

Gradients are timed by FLOPs because a compiled step has no place for a clock; the shares serve both frameworks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxddp.models import SIZES
from jaxddp.planning.formulas import fit_sweep

from .benchmark import NOT_RUN, Benchmark, Case, Options
from .render import CHECK, MIB, STEP, Column, Row, by, new_figure, percent, short, whiskers
from .strategies import COLUMNS, NOTES, cases_of, measure_steps
from .timing import compare
from .training.setup import AT_ONCE, FORWARD_BACKWARD, NUM_PROBED, OPTIONS, QUICK_MODEL, StrategySpec, make_setup

CAPS_MB, QUICK_CAPS_MB = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 1000.0), (1.0, 5.0, 1000.0)
LARGEST_PROBE_BYTES = 64 * MIB
GOOD_ERROR = 0.15
PREDICTED = "Predicted steps, and the best cap"


class Costs(NamedTuple):
    """What was measured for a framework on its ranks."""

    alone_s: float  # the step without communication
    forward_backward_s: float  # the part of it that is forward and backward
    latency_s: float  # o, of one all-reduce
    bytes_per_s: float  # w, of the buffer
    rate: float  # of computing and of communicating while both run, as a share of that alone


def cases(options: Options) -> list[Case]:
    """One case, or one for each framework where they do not share processes."""
    caps = options.bucket_mb or (QUICK_CAPS_MB if options.quick else CAPS_MB)
    setup = make_setup(
        options, model=QUICK_MODEL if options.quick else "lm_9m", batch_size=4 if options.quick else 8,
        num_steps=4 if options.quick else 12, num_warmup=1 if options.quick else 2,
    )  # fmt: skip
    if setup.ranks.num < 2:
        raise ValueError(f"ranks (={setup.ranks.num}) must be at least 2: one rank sends nothing")
    specs = tuple(StrategySpec("bucketed", cap) for cap in sorted(set(caps)))
    largest = min(SIZES[setup.model].num_params * 4, LARGEST_PROBE_BYTES)
    sizes = tuple(4 * max(1, largest // part // 4) for part in (64, 16, 4, 1))
    setup = replace(setup, strategies={"jaxddp": specs, "torchref": specs}, probe_bytes=sizes)
    return cases_of(setup)


def predict_all(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each measured step with its prediction, and one for the best cap of each framework."""
    shares = next((row["ready_shares"] for row in rows if row.get("ready_shares")), None)
    for (framework,), some in by(rows, "framework").items():
        timed = [row for row in some if row.get("baseline_rounds_ms") and row["check"] == "ok"]
        common = {"table": PREDICTED, "framework": framework}
        if not timed or shares is None:
            continue
        try:
            costs = fit_costs(timed[0]["probes_ms"], [row["baseline_rounds_ms"] for row in timed])
        except ValueError as error:
            yield common | {"check": f"{NOT_RUN}{error}"}
            continue
        predicted_ms = [1e3 * predict(row["buckets"], shares, costs) for row in timed]
        for row, step_ms in zip(timed, predicted_ms, strict=True):
            apart = step_ms / row["median_ms"] - 1
            yield common | {
                "label": row["label"], "bucket_mb": row["bucket_mb"], "num_buckets": len(row["buckets"]),
                "median_ms": row["median_ms"], "predicted_ms": step_ms, "error_share": apart,
                "check": "ok" if abs(apart) <= GOOD_ERROR else f"off by {apart:+.0%}",
            }  # fmt: skip
        best = min(timed, key=lambda row: row["median_ms"])
        chosen = timed[int(np.argmin(predicted_ms))]
        as_good = [row for row in timed if compare(row["rounds_ms"], best["rounds_ms"], paired=True).low <= 1]
        yield common | costs._asdict() | {
            "label": f"best: {chosen['label']}, measured {best['label']}",
            "as_good": ", ".join(f"{row['bucket_mb']:g}" for row in as_good),
            "check": "ok" if chosen in as_good else f"off: {best['label']} is better",
        }  # fmt: skip


def fit_costs(probes_ms: Mapping[str, Sequence[float]], baselines_ms: Sequence[Sequence[float]]) -> Costs:
    """Fits the costs to medians of the rounds; raises ValueError if they do not grow as they should."""
    medians_s = {label: float(np.median(times)) / 1e3 for label, times in probes_ms.items()}
    sent = {int(label.split()[-1]): one for label, one in medians_s.items() if label.startswith("all-reduce")}
    sizes = sorted(sent)
    latency_s, bytes_per_s = fit_sweep(sizes, [sent[size] / NUM_PROBED for size in sizes])
    # Started at once, a of computing and b of communicating take |a - b| + min(a, b) / rate.
    alone = medians_s[FORWARD_BACKWARD], sent[sizes[-2]]
    shared_s = medians_s[AT_ONCE] - (max(alone) - min(alone))
    if shared_s <= 0:
        raise ValueError(f"both at once take {medians_s[AT_ONCE]:.3g} s, less than {max(alone) - min(alone):.3g}")
    alone_s = float(np.median(np.concatenate([np.asarray(times) for times in baselines_ms]))) / 1e3
    return Costs(alone_s, alone[0], max(0.0, latency_s), bytes_per_s, min(1.0, min(alone) / shared_s))


def predict(buckets: Sequence[Sequence[Sequence[Any]]], shares: Mapping[str, float], costs: Costs) -> float:
    """Seconds of a step with these buckets, each a list of ``(name, bytes)``, which are sent in order.

    Example:
        >>> buckets, shares = [[("a", 100_000)], [("b", 300_000)]], {"a": 0.5, "b": 1.0}
        >>> [round(predict(buckets, shares, Costs(1.0, 0.8, 0.0, 1e6, rate)), 3) for rate in (1.0, 0.5)]
        [1.3, 1.4]
    """
    now_s = computed_s = 0.0
    for bucket in buckets:
        ready_s = costs.forward_backward_s * max(shares[name] for name, _ in bucket)
        left_s = costs.latency_s + sum(num_bytes for _, num_bytes in bucket) / costs.bytes_per_s
        if computed_s < ready_s:
            now_s, computed_s = now_s + ready_s - computed_s, ready_s
        overlapped_s = min(left_s, costs.forward_backward_s - computed_s)  # both progress equally
        computed_s += overlapped_s
        now_s += overlapped_s / costs.rate + left_s - overlapped_s
    return costs.alone_s + now_s - computed_s


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """Steps by cap, measured and predicted."""
    measured = by([row for row in rows if row.get("rounds_ms")], "framework")
    figure, axes = new_figure("One training step by bucket cap", 1, len(measured))
    for axis, ((framework,), some) in zip(axes[0], measured.items(), strict=True):
        caps, times = [row["bucket_mb"] for row in some], [row["median_ms"] for row in some]
        ends = whiskers(times, [row["p10_ms"] for row in some], [row["p90_ms"] for row in some])
        axis.errorbar(caps, times, yerr=ends, marker="o", capsize=3, color="#4477aa", label="measured, p10 to p90")
        said = [row for row in rows if row.get("predicted_ms") and row["framework"] == framework]
        axis.plot([row["bucket_mb"] for row in said], [row["predicted_ms"] for row in said], "--", color="#ee7733",
                  marker="s", label="predicted")  # fmt: skip
        axis.set(title=framework, xscale="log", xlabel="bucket cap, MiB", ylabel="ms")
        axis.legend()
    yield figure


_PREDICTED_COLUMNS = (
    Column("buckets", "label"),
    Column("framework"),
    Column("number", "num_buckets"),
    *STEP[:1],
    Column("predicted", "predicted_ms", "ms"),
    Column("error", "error_share", form=lambda value: f"{value:+.1%}"),
    Column("as good within noise", "as_good", "MiB"),
    Column(FORWARD_BACKWARD, "forward_backward_s", "ms", lambda seconds: short(1e3 * seconds)),
    Column("latency", "latency_s", "us", lambda seconds: short(1e6 * seconds)),
    Column("rate", "bytes_per_s", "GB/s", lambda rate: short(rate / 1e9)),
    Column("at once", "rate", "of alone", percent),
    CHECK,
)
BENCHMARK = Benchmark(
    "buckets", "bucket sizes: measured beside predicted, in both frameworks", (*OPTIONS, "bucket_mb"), cases,
    measure_steps,
    {"One training step by bucket cap": COLUMNS, PREDICTED: _PREDICTED_COLUMNS},
    plot, predict_all,
    (*NOTES[:3], "predicted: step without communication, and what an in-order pipeline of the buckets leaves over; a"
     " wrong prediction is told, and fails nothing"),
)  # fmt: skip
