"""The best bucket cap of a plan, by the pipeline of ``cost/overlap.py`` with the buckets that each cap really makes.

Buckets fill in reversed forward order, each tensor's backward lasts in proportion to its bytes, and a bucket's
collective has the network to itself. ``tuning.py`` chooses caps for a step that has been compiled, and knows better.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .buckets import MIB, TensorSpec, plan_buckets
from .cost.overlap import Optimum, bucket_times_s, finish_s, uniform_optimum
from .job import Job

# MiB, two to an octave, 1 to 8192.
_CAPS_MB = tuple(2 ** (step / 2) for step in range(27))


class Buckets(NamedTuple):
    """The best bucket cap for the gradients of one micro-batch.

    Attributes:
        cap_mb: MiB.
        num_buckets: How many that makes.
        largest_bytes: Of the largest of them.
        tail_s: What the step waits for after the last gradient.
        backward_s: What the backward takes.
        latency_s: Of a call.
        bytes_per_s: Algorithm bandwidth of its collective.
        equal: The optimum if all buckets were equal; None without latency, which would cut them ever finer.
    """

    cap_mb: float
    num_buckets: int
    largest_bytes: float
    tail_s: float
    backward_s: float
    latency_s: float
    bytes_per_s: float
    equal: Optimum | None


def gradient_rate(job: Job) -> tuple[float, float]:
    """Gives what the collectives of a bucket cost.

    It is reduced and scattered over the X ranks that share, at stage 0 all-reduced, and then its part, at stage 0 the
    whole, is all-reduced over R replicas.

    Args:
        job: The question.

    Returns:
        ``(bytes per second, seconds per call)``: the algorithm bandwidth, inf if nothing is sent.
    """
    rates, ring = job.cluster.machine(job.fsdp, job.tp), job.assumptions.ring
    shared = 1 if job.stage else 2
    part = job.fsdp if job.stage else 1
    seconds_per_byte = float(shared * ring(job.fsdp) / rates.fsdp_bytes_per_s)
    seconds_per_byte += float(2 * ring(job.dp) / part / (rates.dp_bytes_per_s or rates.fsdp_bytes_per_s))
    half_calls = shared * (job.fsdp > 1) + 2 * (job.dp > 1)
    return 1 / seconds_per_byte if seconds_per_byte else math.inf, half_calls * job.cluster.latency_us * 1e-6 / 2


def best_buckets(job: Job, tokens: int, num_microbatches: int) -> Buckets | None:
    """Tries caps of 1 MiB to 8 GiB.

    Args:
        job: The question.
        tokens: B.
        num_microbatches: K.

    Returns:
        The cap that exposes least, and the smallest of those that do equally well; None if no gradient travels.
    """
    if job.num_data_ranks == 1:
        return None
    rate, latency_s = gradient_rate(job)
    sizes = [elements / job.tp * job.assumptions.element_bytes for elements in job.workload.tensor_elements][::-1]
    flops = 2 * job.workload.flops_per_token * tokens / num_microbatches
    backward_s = flops / (job.cluster.num_devices * job.cluster.flops_per_s)
    ready_s = np.cumsum(sizes) / sum(sizes) * backward_s
    specs = [TensorSpec(str(place), (math.ceil(size),), "int8") for place, size in enumerate(sizes)]

    def composition(cap_mb: float) -> list[list[int]]:
        return [[int(tensor.name) for tensor in bucket.tensors] for bucket in plan_buckets(specs, cap_mb).buckets]

    def tail_s(places: list[list[int]]) -> float:
        return float(finish_s(*bucket_times_s(places, sizes, ready_s, rate, latency_s))) - backward_s

    # A cap below the smallest tensor does what that tensor's size does.
    compositions = {cap_mb: composition(cap_mb) for cap_mb in sorted({max(cap, min(sizes) / MIB) for cap in _CAPS_MB})}
    best_mb = min(compositions, key=lambda cap_mb: tail_s(compositions[cap_mb]))
    best = compositions[best_mb]
    return Buckets(
        cap_mb=best_mb,
        num_buckets=len(best),
        largest_bytes=max(sum(sizes[place] for place in places) for places in best),
        tail_s=tail_s(best),
        backward_s=backward_s,
        latency_s=latency_s,
        bytes_per_s=rate,
        equal=uniform_optimum(backward_s, sum(sizes), rate, latency_s) if latency_s else None,
    )
