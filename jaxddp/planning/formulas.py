"""Training costs as formulas: bytes a device holds and sends, exposed communication, compute-bound batches.

ZeRO stage 1 shards the K bytes of optimizer state per parameter over N ranks, stage 2 also the g + a of gradients,
stage 3 also the p of parameters. Traffic in (N-1)/N elements per parameter over A micro-batches, of which a
reduce-scatter or an all-gather of everything counts 1, an all-reduce 2:

    strategy                                        reduced every micro-batch    accumulated, reduced once
    naive, flat, overlapped, bucketed               2 A                          2
    zero1, zero2: reduce-scatter + all-gather       A + 1                        2 (zero2 then holds full gradients)
    zero3: gathered twice per micro-batch           3 A                          2 A + 1 (holds full gradients)
    sharded_optimizer: all-reduce + broadcasts      2 A + 1                      3

Of n equal buckets each has s/n bytes, takes C/n seconds to compute, and is sent at an algorithm bandwidth w, with o
seconds per call. After the last the step waits for

    T(n) = max( C/n + s/w + n o - C ,  s/(n w) + o )
    communication-bound, s/w >= C:   n* = sqrt(C/o)                          T* = s/w - C + 2 sqrt(C o)
    compute-bound, s/w < C:          n* = max(sqrt(C/o), (C - s/w)/o)        T* = s/(n* w) + o, in the latter case

N = X Y R devices: X ranks share and gather parameters (FSDP), Y split each matrix (TP), R replicas reduce gradients
(DP). A step has B tokens, the model P parameters of e bytes, f FLOPs per token of a forward, and A elements per token
that TP all-reduces. A device computes C FLOP/s and sends W_X, W_Y, W_R bytes per second to its groups; r(n) is (n-1)/n,
the share of a ring's bytes that leaves a rank, or 1 where that is neglected.

                     forward                          backward
    compute          f B / (N C)                      2 x
    FSDP             e P r(X) / (Y W_X), gather       2 x: gather, reduce-scatter
    TP               2 e A B r(Y) / (X R W_Y)         the same
    DP               0                                2 e P r(R) / (X Y W_R), half if the optimizer is sharded over R

Rajbhandari et al., ZeRO, SC 2020. Li et al., PyTorch Distributed, VLDB 2020. Stanford CS336, assignment 2.
Austin et al., How to Scale Your Model, 2025: https://jax-ml.github.io/scaling-book/training
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .workload import Workload

DATA_PARALLEL = ("naive", "flat", "overlapped", "bucketed")
STRATEGIES = (*DATA_PARALLEL, "zero1", "zero2", "zero3", "sharded_optimizer")


class PerParameter(NamedTuple):
    """Bytes of training state per parameter: p, g, K and a (0 if micro-batches accumulate in the gradient itself)."""

    parameter: int
    gradient: int
    optimizer: int
    accumulator: int = 0


FP32 = PerParameter(4, 4, 8)
MIXED = PerParameter(2, 2, 12)
MIXED_ACCUMULATED = PerParameter(2, 2, 12, accumulator=4)


def state_bytes(
    num_params: float, stage: int, num_ranks: float = 1, per_parameter: PerParameter = FP32
) -> dict[str, float]:
    """Computes the training state on each of N ranks by component, without padding; gradients with accumulators."""
    p, g, k, a = per_parameter
    held = {"parameters": (p, 3), "gradients": (g + a, 2), "optimizer_state": (k, 1)}  # sharded from this stage on
    return {name: num_params / (num_ranks if stage >= first else 1) * one for name, (one, first) in held.items()}


def gathered_bytes(unit_params: Sequence[int], element_bytes: float, num_units: int = 2, tp: int = 1) -> float:
    """Computes what is gathered at once at stage 3: the ``num_units`` largest consecutive units."""
    starts = range(max(1, len(unit_params) - num_units + 1))
    return max(sum(unit_params[start : start + num_units]) for start in starts) * element_bytes / tp


def least_ranks(cut_bytes: float, whole_bytes: float, capacity_bytes: float) -> float:
    """Computes the smallest N with ``cut / N + whole < capacity``; inf if the whole alone does not fit."""
    room = capacity_bytes - whole_bytes
    return math.floor(cut_bytes / room) + 1 if room > 0 else math.inf


def traffic(strategy: str, num_microbatches: int = 1, reduce: Literal["every", "once"] = "every") -> tuple[int, int]:
    """Counts what a rank sends in a step, of gradients and of parameters, in (N-1)/N elements per parameter."""
    reductions = num_microbatches if reduce == "every" else 1
    if strategy in DATA_PARALLEL:
        return 2 * reductions, 0
    if strategy == "sharded_optimizer":
        return 2 * reductions, 1
    return reductions, 2 * num_microbatches if strategy == "zero3" else 1


def best_buckets(
    compute_s: float, num_bytes: float, bytes_per_s: float, latency_s: float, most: float = math.inf
) -> dict[str, Any]:
    """Computes n* of the table above, from one to ``most``, and T(n*), from C, s, w and o, which must not be 0."""
    send_s = num_bytes / bytes_per_s
    n = min(most, max(1.0, math.sqrt(compute_s / latency_s), (compute_s - send_s) / latency_s))
    tail_s = max(compute_s / n + send_s + n * latency_s - compute_s, send_s / n + latency_s)
    regime = "communication-bound" if send_s >= compute_s else "compute-bound"
    return {"num_buckets": n, "bucket_bytes": num_bytes / n, "tail_s": tail_s, "regime": regime}


class DeviceRates(NamedTuple):
    """C, W_X, W_Y and W_R of a device; on a torus the W are those of all axes of the group."""

    flops_per_s: float
    fsdp_bytes_per_s: float
    tp_bytes_per_s: float
    dp_bytes_per_s: float


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the compute-bound conditions."""

    passes: str = "forward"  # or "backward"
    ring_factors: bool = False  # whether r(n) is (n-1)/n instead of 1
    scattered: bool = False  # whether DP reduce-scatters gradients, instead of an all-reduce
    element_bytes: float = 2  # e

    def ring(self, num_ranks: float) -> float:
        """r(n); 0 for a group of one, which sends nothing."""
        return (num_ranks - 1) / num_ranks if self.ring_factors else float(num_ranks > 1)


class Times(NamedTuple):
    """Seconds of each kind of work: matrix products, and the collectives of FSDP, TP and DP."""

    compute_s: float
    fsdp_s: float
    tp_s: float
    dp_s: float


def times(
    workload: Workload, rates: DeviceRates, tokens: float, fsdp: float, tp: float, dp: float, assumptions: Assumptions
) -> Times:
    """Computes the times of the table above, with ``tokens`` for B over all devices, X, Y and R."""
    size_bytes = assumptions.element_bytes * workload.num_params
    summed_bytes = assumptions.element_bytes * workload.summed_per_token * tokens
    passes, again, reductions = 1, 0.0, 0
    if assumptions.passes == "backward":
        passes, again, reductions = 2, workload.recomputed, 1 if assumptions.scattered else 2
    return Times(
        (passes + again) * workload.flops_per_token * tokens / (fsdp * tp * dp * rates.flops_per_s),
        passes * size_bytes * assumptions.ring(fsdp) / (tp * rates.fsdp_bytes_per_s),
        2 * summed_bytes * assumptions.ring(tp) / (fsdp * dp * rates.tp_bytes_per_s),
        reductions * size_bytes * assumptions.ring(dp) / (fsdp * tp * rates.dp_bytes_per_s),
    )


def min_tokens(
    workload: Workload, rates: DeviceRates, fsdp: float, tp: float, dp: float, assumptions: Assumptions
) -> float:
    """Computes the smallest compute-bound batch, over all devices and not rounded; inf if none is large enough."""
    one = times(workload, rates, 1, fsdp, tp, dp, assumptions)  # of one token: only compute and TP grow with B
    return (one.fsdp_s + one.dp_s) / (one.compute_s - one.tp_s) if one.compute_s > one.tp_s else math.inf
