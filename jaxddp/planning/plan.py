"""What a training step needs of a machine, by the formulas of ``cost/``, before anything is compiled.

The step is worked on in the fewest micro-batches that fit. Norm gains are counted as if tensor parallelism cut them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .bucket_choice import Buckets, best_buckets
from .cost import memory, traffic
from .cost.scaling import Times, accumulated_min_tokens, min_tokens, times
from .cost.split import Split, best_split
from .job import Job


@dataclass(frozen=True)
class Plan:
    """The answers.

    Attributes:
        job: The question.
        tokens: B.
        accumulation_steps: K; None if no number of micro-batches makes the step fit.
        bytes_per_device: By component.
        min_devices: Fewest with this Y and this micro-batch a rank; None if none do.
        min_tokens: Least compute-bound batch, not rounded; None if there is none.
        times: Seconds of a micro-batch's work.
        best_split: Of all devices into FSDP and tensor parallelism.
        buckets: None if no gradient travels.
        traffic_bytes: That each rank sends per step, by strategy, between the groups that work on different tokens.
    """

    job: Job
    tokens: int
    accumulation_steps: int | None
    bytes_per_device: dict[str, float]
    min_devices: int | None
    min_tokens: float | None
    times: Times
    best_split: Split
    buckets: Buckets | None
    traffic_bytes: dict[str, float]

    @property
    def total_bytes(self) -> float:
        """Of all components."""
        return sum(self.bytes_per_device.values())

    @property
    def fits(self) -> bool:
        """Whether a device can hold them."""
        return self.total_bytes < self.job.cluster.memory_bytes

    @property
    def num_microbatches(self) -> int:
        """K, or 1 if no number of them fits."""
        return self.accumulation_steps or 1

    @property
    def micro_batch(self) -> float:
        """Sequences that a data rank works on at once; tokens where there are no sequences."""
        return self.tokens / (self.job.least_tokens * self.num_microbatches)

    @property
    def compute_bound(self) -> bool:
        """Whether computing takes at least as long as communication: in each micro-batch, if each gathers."""
        if self.min_tokens is None:
            return False
        return self.tokens >= float(
            accumulated_min_tokens(self.min_tokens, self.num_microbatches, gathers_every=self.job.gathers)
        )


def plan(job: Job) -> Plan:
    """Answers a question by formulas.

    Args:
        job: The question.

    Returns:
        The plan.

    Raises:
        ValueError: If no tokens are given and no batch is compute-bound.
    """
    machine = job.cluster.machine(*job.ranks[:2])
    least = float(min_tokens(job.workload, machine, *job.ranks, job.assumptions))
    tokens = _tokens(job, least)
    steps = job.accumulation_steps or _fewest_steps(job, tokens)
    buckets = best_buckets(job, tokens, steps or 1)
    components = _bytes_per_device(job, tokens, steps or 1, buckets)
    return Plan(
        job=job,
        tokens=tokens,
        accumulation_steps=steps,
        bytes_per_device=components,
        min_devices=_min_devices(job, components),
        min_tokens=least if math.isfinite(least) else None,
        times=times(job.workload, machine, tokens / (steps or 1), *job.ranks, job.assumptions),
        best_split=best_split(job.workload, job.cluster.machine, job.cluster.num_devices, job.assumptions),
        buckets=buckets,
        traffic_bytes={name: _sent_bytes(job, name, steps or 1) for name in traffic.STRATEGIES},
    )


def units(strategy: str, num_microbatches: int) -> traffic.Traffic:
    """Counts what a strategy of this package sends: zero2 and zero3 reduce every micro-batch, the others their sum.

    Args:
        strategy: One of ``traffic.STRATEGIES``.
        num_microbatches: K.

    Returns:
        In units of all elements times (n-1)/n.
    """
    return traffic.traffic(strategy, num_microbatches, "every" if strategy in ("zero2", "zero3") else "once")


def _tokens(job: Job, least: float) -> int:
    """Those given; else the least compute-bound batch, rounded up to what can be dealt out."""
    if job.tokens is not None:
        return job.tokens
    if math.isinf(least):
        raise ValueError(f"tokens must be given: with tp (={job.tp}) no batch is compute-bound")
    pieces = job.least_tokens * (job.accumulation_steps or 1)
    least_whole = math.ceil(least) if job.sequence_length == 1 else math.ceil(least / pieces) * pieces
    return max(least_whole, pieces)


def _bytes_per_device(job: Job, tokens: int, steps: int, buckets: Buckets | None) -> dict[str, float]:
    element_bytes = job.assumptions.element_bytes
    state = memory.state_bytes(job.workload.num_params / job.tp, job.stage, job.fsdp, job.per_parameter)
    gathered = memory.gathered_bytes(job.workload.unit_params, element_bytes, job.num_gathered_units, job.tp)
    kept = job.workload.kept_per_token, job.workload.kept_cut_per_token
    activations = memory.activation_bytes(tokens / job.num_data_ranks / steps, *kept, element_bytes, job.tp)
    return {
        **{name: float(num_bytes) for name, num_bytes in state._asdict().items()},
        "gathered_parameters": gathered if job.gathers else 0.0,
        "gradient_buckets": buckets.largest_bytes if buckets else 0.0,
        "activations": float(activations),
    }


def _fewest_steps(job: Job, tokens: int) -> int | None:
    """The fewest micro-batches with which the step fits, each of as many whole sequences; None if it never does."""
    most = tokens // job.least_tokens
    steps = 1
    while True:  # buckets are chosen for a micro-batch, and take memory
        whole = _bytes_per_device(job, tokens, steps, best_buckets(job, tokens, steps))
        activations = whole.pop("activations") * steps
        least = float(memory.least_ranks(activations, sum(whole.values()), job.cluster.memory_bytes))
        if least <= steps:
            return steps
        if least > most:
            return None
        steps = next(k for k in range(int(least), most + 1) if job.sequence_length == 1 or most % k == 0)


def _min_devices(job: Job, components: dict[str, float]) -> int | None:
    cut, whole = memory.cut_and_whole_bytes(job.workload.num_params / job.tp, job.stage, job.per_parameter)
    beside = sum(components[name] for name in ("gathered_parameters", "gradient_buckets", "activations"))
    ranks = float(memory.least_ranks(cut, whole + beside, job.cluster.memory_bytes))
    return int(ranks) * job.tp if math.isfinite(ranks) else None


def _sent_bytes(job: Job, strategy: str, num_microbatches: int) -> float:
    sent, element_bytes = units(strategy, num_microbatches), job.assumptions.element_bytes
    num_params = job.workload.num_params / job.tp
    return float(traffic.sent_bytes(sent, num_params, job.num_data_ranks, element_bytes, element_bytes))
