"""Bucket sizes: measured steps beside the predictions of ``prediction.py`` and the simulation.

All caps train in interleaved rounds, with and without communication. In the same rounds and on the same ranks, forward
and backward are timed alone, and all-reduces of a few sizes; the predictions are made from these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..harness.options import Options
from ..harness.ratios import compare
from ..harness.run import NotRun, Run
from ..harness.values import MIB
from ..report.section import show
from ..strategies.benchmark import BATCH_SIZE, QUICK_MODEL, in_turns, make_sized_setup
from ..training.frameworks import FRAMEWORKS, measure_both
from ..training.jax_side import gradient_shares
from ..training.measure import (
    AT_ONCE,
    FORWARD_BACKWARD,
    NUM_PROBED,
    SideResult,
    StrategySpec,
    TrainingSetup,
    all_reduce_label,
)
from ..training.steps import step_rows
from .prediction import Costs, Prediction, Shares, backward_s, fit_costs, judge, predict, regime, simulated, uniform
from .section import section

MODEL = "lm_9m"
CAPS_MB, QUICK_CAPS_MB = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 1000.0), (1.0, 5.0, 1000.0)
NUM_STEPS, NUM_QUICK, QUICK_BATCH_SIZE = 12, 4, 4
NUM_RESAMPLED = 40
LARGEST_PROBE_BYTES = 64 * MIB
OPTIMA, SHARES = "optima", "gradient shares"
ALONE = "one alone sends nothing"


def describe(options: Options) -> tuple[TrainingSetup, str]:
    """Describes the sweep.

    Defaults (short form): 8 caps (3), 2 ranks, 12 rounds (4), a batch of 8 (4), the model lm_9m (byte_shallow); on
    GPUs all of them, 30 rounds (12), 16 sequences for each, the model seed_xl.

    Raises:
        ValueError: If one rank is asked for, the model is unknown or the batch cannot be split.
    """
    caps = options.bucket_mb or (QUICK_CAPS_MB if options.quick else CAPS_MB)
    if options.ranks == 1:
        raise ValueError(f"ranks (=1) must be at least 2: {ALONE}")
    model, batch_size = (QUICK_MODEL, QUICK_BATCH_SIZE) if options.quick else (MODEL, BATCH_SIZE)
    setup, described = make_sized_setup(options, model, batch_size, NUM_STEPS, NUM_QUICK)
    specs = tuple(StrategySpec("bucketed", cap) for cap in sorted(set(caps)))
    swept = ", ".join(f"{spec.bucket_mb:g}" for spec in specs)
    return in_turns(replace(setup, strategies=specs, with_schedules=True)), f"{described}; buckets of {swept} MiB"


def run(this: Run, setup: TrainingSetup) -> bool:
    """Sweeps in both frameworks, prints the table and writes the folder; a wrong prediction is no failure."""
    (found,) = this.part(SHARES if setup.ranks.num > 1 else "sweep", lambda: [_share_row(setup)])
    if "ready_shares" in found:
        shares = Shares(found["forward_share"], found["ready_shares"])
        setup = replace(setup, probe_bytes=probe_sizes(found["gradient_bytes"]))
        rows = measure_both(this, dict.fromkeys(FRAMEWORKS, setup), partial(bucket_rows, shares))
        this.part(OPTIMA, lambda: optimum_rows(rows), is_derived=True)
    return show(this, section(this.rows))


def probe_sizes(num_bytes: int) -> tuple[int, ...]:
    """Sizes of the timed all-reduces: all gradients, and down to a 64th of them, in whole float32."""
    largest = min(num_bytes, LARGEST_PROBE_BYTES)
    return tuple(4 * max(1, largest // part // 4) for part in (64, 16, 4, 1))


def bucket_rows(shares: Shares, framework: str, setup: TrainingSetup, side: SideResult) -> list[dict[str, Any]]:
    """Makes rows with predictions of one framework's measurements."""
    rows = step_rows(framework, setup, side)
    if not any(one.baseline_seconds for one in side.measured.values()):
        return rows
    try:
        costs = _costs(setup, side)
    except ValueError as error:
        return [row | {"check": f"not predicted: {error}" if row["check"] == "ok" else row["check"]} for row in rows]
    resampled = list(_resampled_costs(setup, side))
    return [row | _predicted(row, shares, costs, resampled, side) for row in rows]


def _costs(setup: TrainingSetup, side: SideResult, rounds: Any = slice(None)) -> Costs:
    """Fits the costs to the medians of some rounds, or of all."""

    def median_s(*timed: Sequence[float]) -> float:
        return float(np.median(np.concatenate([np.asarray(seconds)[rounds] for seconds in timed])))

    alone_s = median_s(*(one.baseline_seconds for one in side.measured.values() if one.baseline_seconds))
    forward_backward_s = median_s(side.probes[FORWARD_BACKWARD])
    all_reduces = {size: median_s(side.probes[all_reduce_label(size)]) / NUM_PROBED for size in setup.probe_bytes}
    at_once = (median_s(side.probes[all_reduce_label(setup.probe_bytes[-2])]), median_s(side.probes[AT_ONCE]))
    return fit_costs(alone_s, forward_backward_s, all_reduces, side.num_ranks, at_once)


def _resampled_costs(setup: TrainingSetup, side: SideResult) -> Iterator[Costs]:
    """Fits the costs to resampled rounds; their variation is the effect of noise."""
    num_rounds = len(side.probes[FORWARD_BACKWARD])
    for rounds in np.random.default_rng(0).integers(num_rounds, size=(NUM_RESAMPLED, num_rounds)):
        with contextlib.suppress(ValueError):  # times of these rounds do not grow with sizes
            yield _costs(setup, side, rounds)


def _predicted(
    row: Mapping[str, Any], shares: Shares, costs: Costs, resampled: Sequence[Costs], side: SideResult
) -> dict[str, Any]:
    """A row's prediction, its standard deviation over resampled costs, and its components."""
    measured = side.measured.get(StrategySpec(row["strategy"], row["bucket_mb"]).label)
    if measured is None:
        return {}
    num_bytes = sum(size for bucket in measured.buckets for _, size in bucket)
    best = uniform(num_bytes, shares, costs)
    said, *others = (predict(measured.buckets, shares, some) for some in (costs, *resampled))
    fields = {
        "num_buckets": len(measured.buckets),
        "gradient_bytes": num_bytes,
        **_in_ms("predicted", said, others),
        "regime": regime(num_bytes, shares, costs),
        "uniform_optimum_mb": best and best.bucket_bytes / MIB,
        "step_alone_ms": costs.step_without_communication_s * 1e3,
        "forward_backward_ms": costs.forward_backward_s * 1e3,
        "backward_ms": backward_s(shares, costs) * 1e3,
        "alpha_us": costs.latency_s * 1e6,
        "alpha_error_us": costs.latency_error_s * 1e6,
        "gb_per_s": costs.bytes_per_s / 1e9,
        "gb_per_s_error": costs.bytes_per_s_error / 1e9,
        "rate_at_once": costs.rate_at_once,
        "num_resampled": len(resampled),
    }
    if measured.schedule is not None:
        fields["is_async"] = any(one.is_async for one in measured.schedule.collectives())
        try:
            shown = [simulated(measured.schedule, side.device, some) for some in (costs, *resampled)]
            fields |= _in_ms("simulated", shown[0], shown[1:])
        except ValueError as error:
            fields["not_simulated"] = str(error)
    judged = judge(said.step_s, measured.timings.median_ms * 1e-3)
    return fields | {"error_share": judged["error_share"]} | (judged if row["check"] == "ok" else {})


def _in_ms(name: str, said: Prediction, resampled: Sequence[Prediction]) -> dict[str, Any]:
    """The fields of a prediction, with standard deviations if there are two resampled ones."""
    fields: dict[str, Any] = {}
    for part, seconds, *others in zip(("", "_exposed"), said, *resampled, strict=True):
        fields[f"{name}{part}_ms"] = seconds * 1e3
        fields[f"{name}{part}_sd_ms"] = float(np.std(others, ddof=1)) * 1e3 if len(others) > 1 else None
    return fields


def optimum_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compares the predicted best cap with the measured one, in a row for each framework.

    Caps are as good as the best if the 95 % interval of their ratio to it contains 1.
    """
    for framework in FRAMEWORKS:
        timed = [row for row in rows if row.get("framework") == framework and "predicted_ms" in row]
        timed = [row for row in timed if not row["check"].startswith("WRONG")]
        if not timed:
            continue
        best = min(timed, key=lambda row: row["median_ms"])
        predicted = min(timed, key=lambda row: row["predicted_ms"])
        as_good = [row for row in timed if compare("", row["rounds_ms"], best["rounds_ms"], 1.0).low <= 1]
        kept = (
            "framework", "backend", "device", "ranks", "kind", "num_ranks", "model", "params_bytes", "global_batch",
            "strategy", "regime", "uniform_optimum_mb", "gradient_bytes", "step_alone_ms", "forward_backward_ms",
            "backward_ms", "alpha_us", "alpha_error_us", "gb_per_s", "gb_per_s_error",
            "rate_at_once",
        )  # fmt: skip
        is_good = predicted in as_good
        yield {key: best[key] for key in kept} | {
            "optimum_mb": predicted["bucket_mb"],
            "measured_optimum_mb": best["bucket_mb"],
            "as_good_mb": [row["bucket_mb"] for row in as_good],
            "check": "ok" if is_good else f"off: {best['bucket_mb']:g} MiB is better",
        }


def _share_row(setup: TrainingSetup) -> dict[str, Any]:
    """When gradients are ready, as shares of the step's FLOPs."""
    if setup.ranks.num < 2:
        raise NotRun(f"{setup.ranks.in_words}: {ALONE}")
    forward, ready, num_bytes = gradient_shares(setup)
    found = {"forward_share": forward, "ready_shares": ready, "gradient_bytes": num_bytes}
    return {"model": setup.model, **found, "check": "ok"}
