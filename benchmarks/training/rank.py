"""What a rank does: it makes every variant, times them in interleaved rounds, and gives the rows.

Frameworks that share processes take turns in the same rounds. A step is as slow, and as wrong, as on its worst rank.
Exposed communication is the median, over rounds, of a step's time minus that of the same step without communication.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from jaxddp.training.clock import summarize

from ..benchmark import FAILED, WRONG
from ..ranks import Ranks, about, agree, gather, say_on_rank, slowest
from ..timing import Attempts, interleave
from .jax_side import JaxSide
from .setup import PEERS, SILENT, Metrics, Run, TrainingSetup
from .torch_side import TorchSide

# A wrong divisor is wrong by a factor of the number of ranks at least; what weights apart by rounding do to losses and
# norms over some 20 steps was seen to be under 0.1 %. Roundings of bfloat16 are 0.4 % each.
METRIC_TOLERANCE = {"f32": 0.01, "tf32": 0.01, "bf16": 0.05}
# Of the way that weights go, they end apart by all of it if they are never updated, by 0.9 if each rank takes its own
# gradients (a toy), and by rounding by 7e-5, in bfloat16 by 0.06 (lm_9m, 14 steps of 1e-4).
PATH_TOLERANCE = 0.5


def train(ranks: Ranks, setup: TrainingSetup) -> list[dict[str, Any]]:
    """Trains under every strategy; runs on each rank, inside a process group, before JAX has started there."""
    attempt, runs, references = Attempts(agree), dict[str, Run](), dict[str, Any]()
    num_rounds = len(setup.batches)
    for framework in setup.frameworks:
        side: Any = (JaxSide if framework == "jaxddp" else TorchSide)(ranks, setup)
        runs |= _runs(framework, side, setup, attempt)
        say_on_rank(f"{framework}: single-process training")
        alone = side.reference()
        start = alone.weights()
        references[framework] = start, [alone.step(index) for index in range(num_rounds)], alone.weights()
        del alone  # and its memory

    def on_round(done: int) -> None:
        is_told = done % max(1, num_rounds // 4) == 0
        say_on_rank(f"{' and '.join(setup.frameworks)}: {done} of {num_rounds} rounds" if is_told else None)

    steps = {label: run.step for label, run in runs.items()}
    metrics, seconds = interleave(
        steps, num_rounds, setup.num_warmup, attempt=attempt, before=lambda label: dist.barrier(),
        on_round=on_round,
    )  # fmt: skip
    times = {label: slowest(of_rank) for label, of_rank in seconds.items()}
    rows = []
    for framework, reference in references.items():
        params = sum(one.size for one in reference[0].values())
        common = about(ranks, framework) | {
            "model": setup.model, "dtype": setup.dtype, "params_bytes": params * (2 if setup.dtype == "bf16" else 4),
            "global_batch": setup.global_batch, "microbatch": setup.global_batch // ranks.num,
            "num_rounds": num_rounds - setup.num_warmup, "frameworks_in_rounds": list(setup.frameworks),
        }  # fmt: skip
        for spec in setup.strategies[framework]:
            row = common | {"strategy": spec.name, "bucket_mb": spec.bucket_mb, "label": spec.label}
            if (label := f"{framework} {spec.label}") not in metrics:
                rows.append(row | {"check": f"{FAILED}{attempt.failed[label]}"})
                continue
            row |= _trained(runs[label], metrics[label], reference, spec.name in PEERS[framework])
            row |= summarize(times[label])._asdict() | {"rounds_ms": _in_ms(times[label])}
            row["check"] = check(row, setup)
            # jit without communication is naive without it, which computes the same.
            silent = f"{framework} {'naive' if spec.name == 'jit' else spec.label}{SILENT}"
            if silent in times:
                row |= exposed(times[label], times[silent])
            elif silent in attempt.failed and row["check"] == "ok":
                row["check"] = f"{FAILED}{SILENT.strip()}: {attempt.failed[silent]}"
            rows.append(row)
    return rows


def _runs(framework: str, side: Any, setup: TrainingSetup, attempt: Attempts) -> dict[str, Run]:
    """Makes a run of each strategy, and of some one without communication, by label.

    States are made one after the other, since that runs programs; their steps may compile at the same time.
    """
    wanted = [(spec, "") for spec in setup.strategies[framework]]
    wanted += [(spec, SILENT) for spec in setup.baselines(framework)]
    say_on_rank(f"{framework}: preparing {len(wanted)} training runs")
    runs, compiling = {}, {}
    with ThreadPoolExecutor(side.num_compilers) as pool:
        for spec, suffix in wanted:
            label = f"{framework} {spec.label}{suffix}"
            if (compile_step := attempt(label, partial(side.start, spec, sends=not suffix))) is not None:
                compiling[label] = pool.submit(compile_step)
        for label, compiled in compiling.items():
            if (run := attempt(label, compiled.result)) is not None:
                runs[label] = run
            say_on_rank()
    return runs


def _trained(run: Run, found: Metrics, reference: tuple[Any, Metrics, Any], is_peer: bool) -> dict[str, Any]:
    """What a run communicates, and how far it ended from single-process training; a peer's losses are each rank's."""
    start, expected, trained = reference
    weights, of_ranks = run.weights(), np.array(gather(found))  # of_ranks: [rank, round, loss and norm]
    if is_peer:
        of_ranks[..., 0] = of_ranks[..., 0].mean(0)
    pairs = zip(of_ranks.swapaxes(0, 1).tolist(), expected, strict=True)
    worst = [max(of_round, key=partial(distance, wanted)) for of_round, wanted in pairs]
    apart = [np.max(np.abs(weights[name].astype(np.float64) - one)) for name, one in trained.items()]
    return {
        "planned": run.planned, "compiled": run.found,
        "first_loss": worst[0][0], "loss": worst[-1][0], "reference_loss": expected[-1][0],
        "max_weight_difference": float(np.max(gather(float(np.max(apart))))),  # NaN is worst
        "path_difference": float(np.max(gather(np.divide(norm_of(weights, trained), norm_of(start, trained))))),
        "max_metric_difference": max(map(distance, expected, worst)),
    }  # fmt: skip


def norm_of(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """The Euclidean norm of a difference of weights."""
    return math.sqrt(sum(float(np.sum(np.square(one[name] - other[name], dtype=np.float64))) for name in other))


def distance(wanted: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference of a step's loss and gradient norm; infinite if one is not a number."""
    apart = float(np.max(np.abs(np.divide(found, wanted) - 1)))
    return float("inf") if np.isnan(apart) else apart


def exposed(seconds: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """The fields of exposed communication: step minus baseline, round by round."""
    found = summarize(np.subtract(seconds, baseline).tolist())._asdict()
    names = {"median_ms": "exposed_ms", "p10_ms": "exposed_p10_ms", "p90_ms": "exposed_p90_ms"}
    return {names[name]: one for name, one in found.items()} | {"baseline_rounds_ms": _in_ms(baseline)}


def check(row: Mapping[str, Any], setup: TrainingSetup) -> str:
    """``"ok"``, or what is wrong with a run."""
    if row["planned"] is not None and sorted(map(list, row["planned"])) != sorted(map(list, row["compiled"] or [])):
        return f"{WRONG}{len(row['planned'])} collectives planned, others found"
    if setup.tolerance is not None and not row["max_weight_difference"] <= setup.tolerance:  # NaN is wrong too
        return f"{WRONG}weights differ by more than {setup.tolerance:.0e}"
    if not row["path_difference"] <= PATH_TOLERANCE:
        return f"{WRONG}weights end elsewhere by more than {PATH_TOLERANCE:.0%} of the way from the start"
    if not row["max_metric_difference"] <= (bound := METRIC_TOLERANCE[setup.dtype]):
        return f"{WRONG}loss or gradient norm differs by more than {bound:.0%}"
    if setup.must_learn and row["loss"] >= row["first_loss"]:
        return f"{WRONG}the loss did not fall"
    return "ok"


def _in_ms(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * one, 4) for one in seconds]
