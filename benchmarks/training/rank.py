"""What a rank does: it makes every variant, times them in interleaved rounds, and gives the rows.

Frameworks that share processes take turns in the same rounds. A step is as slow, and as wrong, as on its worst rank.
Exposed communication is the median, over rounds, of a step's time minus that of the same step without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from jaxddp.environment import cuda_libraries
from jaxddp.training.clock import summarize

from ..benchmark import FAILED, NOT_RUN, WRONG, Say
from ..ranks import Ranks, agree, gather, say_on_rank
from ..timing import Attempts, interleave
from .setup import PEERS, PROBES, SILENT, StrategySpec, TrainingSetup, has_baseline

# A wrong divisor is wrong by a factor of the number of ranks at least; what weights apart by rounding do to losses and
# norms over some 20 steps was seen to be under 0.1 %. Roundings of bfloat16 are 0.4 % each.
METRIC_TOLERANCE = {"f32": 0.01, "tf32": 0.01, "bf16": 0.05}
# What a peer raises that its framework's version or this machine does not have; anything else is a fault.
_NOT_THERE = ("NotImplementedError: ", "ImportError: ", "ModuleNotFoundError: ")
_Metrics = list[tuple[float, float]]


def measure(setup: TrainingSetup, frameworks: tuple[str, ...], say: Say) -> Iterator[dict[str, Any]]:
    """Trains under the strategies of some frameworks, in processes that they share; says and gives their rows."""
    for row in setup.ranks.run(train, setup.of(frameworks), in_jax="jaxddp" in frameworks, say=say):
        if row["strategy"] != PROBES:
            say(in_words(row))
        yield row


def train(ranks: Ranks, setup: TrainingSetup) -> list[dict[str, Any]]:
    """Trains under every strategy; runs on each rank, inside a process group, before JAX has started there."""
    attempt, sides, references = Attempts(agree), {}, {}
    runs, probes = dict[str, Any](), dict[str, Any]()
    weights: dict[str, np.ndarray] | None = None
    for framework in setup.frameworks:
        side = sides[framework] = _side(framework, ranks, setup, weights)
        baselines = [one for one in setup.strategies[framework] if setup.with_baselines and has_baseline(one)]
        silent = [one for one in baselines if one.name != "jit"]
        runs |= side.make(attempt, silent)
        say_on_rank(f"{framework}: single-process training")
        references[framework] = side.reference()
        weights = _weights_of(side)
        probes |= side.probes() if setup.probe_bytes else {}
    num_rounds = len(setup.batches)

    def on_round(done: int) -> None:
        is_told = done % max(1, num_rounds // 4) == 0
        say_on_rank(f"{' and '.join(sides)}: {done} of {num_rounds} rounds" if is_told else None)

    steps = {label: run.step for label, run in runs.items()}
    metrics, seconds = interleave(
        steps | probes, num_rounds, setup.num_warmup, attempt=attempt, before=lambda label: dist.barrier(),
        on_round=on_round,
    )  # fmt: skip
    slowest = {
        label: [max(times) for times in zip(*gather(of_rank), strict=True)] for label, of_rank in seconds.items()
    }
    rows, itemsize = list[dict[str, Any]](), 2 if setup.dtype == "bf16" else 4
    for framework, side in sides.items():
        of_all = {
            "framework": framework, "backend": ranks.backend(framework), "device": side.device,
            "ranks": ranks.in_words(framework), "num_ranks": ranks.num, "model": setup.model, "dtype": setup.dtype,
            "params_bytes": sum(one.size for one in references[framework][1].values()) * itemsize,
            "global_batch": setup.global_batch, "microbatch": setup.global_batch // ranks.num,
            "num_rounds": num_rounds - setup.num_warmup, "frameworks_in_rounds": list(sides),
            "versions": side.versions | (cuda_libraries() if ranks.kind == "gpus" else {}),
        }  # fmt: skip
        for spec in setup.strategies[framework]:
            row = of_all | {"strategy": spec.name, "bucket_mb": spec.bucket_mb, "label": spec.label}
            label = f"{framework} {spec.label}"
            if label not in metrics:
                why = attempt.failed[label]
                is_missing = spec.name in PEERS[framework] and why.startswith(_NOT_THERE)
                rows.append(row | {"check": f"{NOT_RUN if is_missing else FAILED}{why}"})
                continue
            run = runs[label]
            found = run.over_ranks(metrics[label]) if hasattr(run, "over_ranks") else metrics[label]
            row |= _fields(run, _worst(found, references[framework][0]), references[framework], slowest[label])
            row["check"] = check(row, setup)
            baseline = f"{framework} {_baseline_of(spec)}"
            if baseline in slowest:
                row |= exposed(slowest[label], slowest[baseline])
            elif baseline in attempt.failed and row["check"] == "ok":
                row["check"] = f"{FAILED}{SILENT.strip()}: {attempt.failed[baseline]}"
            rows.append(row)
        if setup.probe_bytes:
            probed = {label: slowest[label] for label in probes if label in slowest}
            rows.append(of_all | _probes_row(framework, probed, runs))
    return rows


def _probes_row(framework: str, probed: Mapping[str, Sequence[float]], runs: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a step's parts, each timed alone."""
    mine = {
        label.removeprefix(f"{framework} "): _in_ms(times)
        for label, times in probed.items()
        if label.startswith(f"{framework} ")
    }
    row = {"strategy": PROBES, "probes_ms": mine, "check": "ok", "table": "The step's parts"}
    ours = [run for label, run in runs.items() if label.startswith(framework) and hasattr(run, "ready_shares")]
    return row | ({"ready_shares": ours[0].ready_shares()} if ours else {})


def _side(framework: str, ranks: Ranks, setup: TrainingSetup, weights: Mapping[str, np.ndarray] | None) -> Any:
    if framework == "jaxddp":
        from .jax_side import JaxSide

        return JaxSide(ranks, setup)
    from .torch_side import TorchSide

    return TorchSide(ranks, setup, weights)


def _weights_of(side: Any) -> dict[str, np.ndarray] | None:
    """The weights from which JAX has started; those of torch are not needed: it comes last."""
    from jaxddp.checkpoint.interop import to_numpy

    params = getattr(side, "params", None)
    return None if params is None else {name: one.astype(np.float32) for name, one in to_numpy(params).items()}


def _baseline_of(spec: StrategySpec) -> str:
    """What a strategy's step is without communication: of ``jit`` it is ours, which computes the same."""
    return f"{'naive' if spec.name == 'jit' else spec.label}{SILENT}"


def _worst(found: _Metrics, expected: _Metrics) -> _Metrics:
    """Of each round the metrics of the rank that is farthest from single-process training."""
    of_ranks = zip(*gather(found), strict=True)
    pairs = zip(of_ranks, expected, strict=True)
    return [max(of_round, key=lambda one, wanted=wanted: distance(one, wanted)) for of_round, wanted in pairs]  # type: ignore[misc]


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of a step's loss and gradient norm; infinite if one is not a number."""
    found = float(np.max(np.abs(np.divide(ours, theirs) - 1)))
    return float("inf") if np.isnan(found) else found


def _fields(run: Any, found: _Metrics, reference: tuple[_Metrics, Any], seconds: list[float]) -> dict[str, Any]:
    expected, trained = reference
    weights = run.weights()
    apart = max(float(np.max(np.abs(weights[name].astype(np.float64) - one))) for name, one in trained.items())
    return {
        "planned": run.planned,
        "compiled": run.found,
        "buckets": run.buckets,
        "first_loss": found[0][0],
        "loss": found[-1][0],
        "reference_loss": expected[-1][0],
        "max_weight_difference": float(np.max(gather(apart))),  # NaN is worst
        "max_metric_difference": max(map(distance, found, expected)),
        **summarize(seconds)._asdict(),
        "rounds_ms": _in_ms(seconds),
    }


def exposed(seconds: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """The fields of exposed communication: step minus baseline, round by round."""
    found = summarize(np.subtract(seconds, baseline).tolist())
    return {
        "exposed_ms": found.median_ms,
        "exposed_p10_ms": found.p10_ms,
        "exposed_p90_ms": found.p90_ms,
        "baseline_rounds_ms": _in_ms(baseline),
    }


def check(row: Mapping[str, Any], setup: TrainingSetup) -> str:
    """``"ok"``, or what is wrong with a run."""
    if row["planned"] is not None and sorted(map(list, row["planned"])) != sorted(map(list, row["compiled"] or [])):
        return f"{WRONG}{len(row['planned'])} collectives planned, others found"
    if setup.tolerance is not None and not row["max_weight_difference"] <= setup.tolerance:  # NaN is wrong too
        return f"{WRONG}weights differ by more than {setup.tolerance:.0e}"
    if not row["max_metric_difference"] <= (bound := METRIC_TOLERANCE[setup.dtype]):
        return f"{WRONG}loss or gradient norm differs by more than {bound:.0%}"
    if setup.must_learn and row["loss"] >= row["first_loss"]:
        return f"{WRONG}the loss did not fall"
    return "ok"


def compare_frameworks(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row that says how far single-process training of the two frameworks ends apart."""
    losses = {row["framework"]: row["reference_loss"] for row in rows if row.get("reference_loss")}
    if len(losses) == 2:
        apart = abs(losses["jaxddp"] / losses["torchref"] - 1)
        bound = max(METRIC_TOLERANCE[row["dtype"]] for row in rows if row.get("reference_loss"))
        right = apart <= bound
        yield {
            "table": BETWEEN, "framework": "jaxddp and torchref", "reference_difference": apart,
            "check": "ok" if right else f"{WRONG}their losses differ by more than {bound:.0%}",
        }  # fmt: skip


BETWEEN = "Single-process training in JAX and in PyTorch"


def in_words(row: Mapping[str, Any]) -> str:
    """A measured step in a line."""
    name = f"{row['framework']} {row['label']}"
    if row.get("median_ms") is None:
        return f"{name}: {row['check']}"
    hidden = "" if row.get("exposed_ms") is None else f", {row['exposed_ms']:+.3g} exposed"
    spread = f"p10 {row['p10_ms']:.3g}, p90 {row['p90_ms']:.3g}, {row['num_rounds']} rounds"
    return f"{name}: {row['median_ms']:.3g} ms ({spread}){hidden}, {row['check']}"


def _in_ms(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * one, 4) for one in seconds]
