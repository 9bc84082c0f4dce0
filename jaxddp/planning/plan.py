"""Whether a training step fits a cluster and keeps it busy, by ``formulas.py``, before anything is compiled.

The devices form R replicas of X x Y ranks. Y ranks split each matrix (tensor parallelism). X ranks share the training
state by ZeRO stage and work on different tokens, as the replicas do. Stage 3 gathers parameters (FSDP); the other
stages only reduce gradients, in the backward. The step is split into the fewest micro-batches that fit into memory.
Norm gains are counted as if tensor parallelism split them too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from ..arguments import check_integer
from ..communication.buckets import DEFAULT_BUCKET_MB, MIB
from . import formulas
from .estimate import Run, StepTime, estimate, product_seconds
from .formulas import FP32, Assumptions, Buckets, DeviceRates, PerParameter, Split, Times
from .machine import Cluster
from .workload import Workload

_TABLE_TOKENS = 4096  # rows of the largest measured products
_GATHERED_UNITS = 3  # at the same time at stage 3: one in use, two prefetched


@dataclass(frozen=True)
class TrainingJob:
    """What to plan: a model on a cluster, used in one way.

    Raises a ValueError if a number is out of range, the ranks do not divide the devices, or the tokens do not divide
    into whole sequences per data rank and micro-batch.
    """

    workload: Workload
    cluster: Cluster
    fsdp: int  # X
    tp: int = 1  # Y
    tokens: int | None = None  # B, per step; None for the smallest compute-bound batch
    sequence_length: int = 1  # tokens that must stay on one rank; 1 for a model without sequences
    stage: int = 3  # of ZeRO: 0 shares nothing, 1 the optimizer state, 2 also gradients, 3 also parameters
    per_parameter: PerParameter = FP32
    assumptions: Assumptions = formulas.DEFAULT
    accumulation_steps: int | None = None  # K, micro-batches per step; None for the fewest that fit

    def __post_init__(self) -> None:
        for name in ("fsdp", "tp", "sequence_length", "tokens", "accumulation_steps"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value)
        if self.stage not in formulas.STAGES:
            raise ValueError(f"stage (={self.stage}) must be one of {', '.join(map(str, formulas.STAGES))}")
        if self.cluster.num_devices % (self.fsdp * self.tp):
            raise ValueError(
                f"fsdp x tp (={self.fsdp} x {self.tp}) must divide the {self.cluster.num_devices} devices of "
                f"{self.cluster.name}"
            )
        pieces = self.least_tokens * (self.accumulation_steps or 1)
        if self.tokens is not None and (self.tokens < pieces or (self.sequence_length > 1 and self.tokens % pieces)):
            rule = "at least" if self.sequence_length == 1 else "a multiple of"
            raise ValueError(
                f"tokens (={self.tokens}) must be {rule} sequence length x data ranks x accumulation steps "
                f"(={self.sequence_length} x {self.num_data_ranks} x {self.accumulation_steps or 1})"
            )

    @property
    def dp(self) -> int:
        """R, the number of replicas."""
        return self.cluster.num_devices // (self.fsdp * self.tp)

    @property
    def num_data_ranks(self) -> int:
        """X R, the number of groups that work on different tokens."""
        return self.fsdp * self.dp

    @property
    def held(self) -> PerParameter:
        """Bytes per parameter at this stage: stage 3 casts masters when it gathers them, so it holds no copies."""
        has_masters = self.per_parameter.optimizer > FP32.optimizer  # beside AdamW's moments
        if self.stage < 3 or not has_masters:
            return self.per_parameter
        master = FP32.parameter
        return self.per_parameter._replace(parameter=master, optimizer=self.per_parameter.optimizer - master)

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered in every micro-batch."""
        return self.stage == 3 and self.fsdp > 1

    @property
    def ranks(self) -> tuple[int, int, int]:
        """Sizes of the groups that gather parameters, split matrices and reduce gradients."""
        return (self.fsdp, self.tp, self.dp) if self.gathers else (1, self.tp, self.num_data_ranks)

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest step: one sequence per data rank."""
        return self.num_data_ranks * self.sequence_length


@dataclass(frozen=True)
class Plan:
    """The plan of a job."""

    job: TrainingJob
    tokens: int  # B
    accumulation_steps: int | None  # K; None if no number of micro-batches fits
    bytes_per_device: dict[str, float]
    min_devices: int | None  # fewest with this Y and this micro-batch per rank; None if none fit
    min_tokens: float | None  # smallest compute-bound batch, not rounded; None if there is none
    times: Times  # of one micro-batch
    best_split: Split
    buckets: Buckets | None  # best of a micro-batch's gradients; None if none are reduced, or a call has no latency
    traffic_bytes: dict[str, float]  # that each rank sends per step to data-parallel peers, by strategy
    flops_per_s: float  # at which a device computes the products of a forward
    step: StepTime | None  # None with tensor parallelism, replicas of shards, on a torus or by hand

    @property
    def total_bytes(self) -> float:
        """Sum of all components."""
        return sum(self.bytes_per_device.values())

    @property
    def fits(self) -> bool:
        """Whether the step fits into a device's memory."""
        return self.total_bytes < self.job.cluster.memory_bytes

    @property
    def num_microbatches(self) -> int:
        """K, or 1 if no number of micro-batches fits."""
        return self.accumulation_steps or 1

    @property
    def micro_batch(self) -> float:
        """Sequences (or tokens, without sequences) that a data rank processes at once."""
        return self.tokens / (self.job.least_tokens * self.num_microbatches)

    @property
    def compute_bound(self) -> bool:
        """Whether compute takes at least as long as communication; per micro-batch where each one gathers."""
        if self.min_tokens is None:
            return False
        return self.tokens >= self.min_tokens * (self.num_microbatches if self.job.gathers else 1)


def plan(job: TrainingJob) -> Plan:
    """Plans a job.

    Raises:
        ValueError: If no tokens are given and no batch is compute-bound.
    """
    workload, cluster, assumed = job.workload, job.cluster, job.assumptions
    rates = _rates(job, *job.ranks[:2])
    least = formulas.min_tokens(workload, rates, *job.ranks, assumed)
    tokens = _tokens(job, least)
    components = _bytes_per_device(job, tokens)
    steps = job.accumulation_steps or _fewest_steps(job, tokens, components)
    num_microbatches = steps or 1
    components["activations"] /= num_microbatches
    run = _run(job, tokens // (job.num_data_ranks * num_microbatches), num_microbatches)
    is_known = job.tp == 1 and job.fsdp in (1, job.num_data_ranks) and not cluster.torus
    return Plan(
        job=job,
        tokens=tokens,
        accumulation_steps=steps,
        bytes_per_device=components,
        min_devices=_min_devices(job, components),
        min_tokens=least if math.isfinite(least) else None,
        times=formulas.times(workload, rates, tokens / num_microbatches, *job.ranks, assumed),
        best_split=formulas.best_split(workload, partial(_rates, job), cluster.num_devices, assumed),
        buckets=_best_buckets(job, tokens / num_microbatches, rates.flops_per_s),
        traffic_bytes={name: _traffic_bytes(job, name, num_microbatches) for name in formulas.STRATEGIES},
        flops_per_s=rates.flops_per_s,
        step=estimate(run) if run is not None and is_known else None,
    )


def _best_buckets(job: TrainingJob, tokens: float, flops_per_s: float) -> Buckets | None:
    """The best equal buckets for the gradients of a micro-batch; a tensor is not split."""
    rate, latency_s = gradient_rate(job)
    if not latency_s:
        return None
    backward_s = 2 * job.workload.flops_per_token * tokens / (job.cluster.num_devices * flops_per_s)
    num_bytes = job.workload.num_params / job.tp * job.assumptions.element_bytes
    return formulas.best_buckets(backward_s, num_bytes, rate, latency_s, len(job.workload.tensors))


def gradient_rate(job: TrainingJob) -> tuple[float, float]:
    """Computes the cost of reducing a bucket: its algorithm bandwidth, inf if nothing is sent, and seconds per call.

    It is reduce-scattered over the X ranks that share state (all-reduced at stage 0); the resulting part, at stage 0
    the whole, is all-reduced over the R replicas.
    """
    rates, ring = job.cluster.rates(job.fsdp, job.tp), job.assumptions.ring
    shared, part = (1, job.fsdp) if job.stage else (2, 1)
    seconds_per_byte = shared * ring(job.fsdp) / rates.fsdp_bytes_per_s
    seconds_per_byte += 2 * ring(job.dp) / part / (rates.dp_bytes_per_s or rates.fsdp_bytes_per_s)
    half_calls = shared * (job.fsdp > 1) + 2 * (job.dp > 1)
    rate = 1 / seconds_per_byte if seconds_per_byte else math.inf
    return rate, half_calls * job.cluster.network.latency_us * 1e-6 / 2


def _traffic_bytes(job: TrainingJob, strategy: str, num_microbatches: int) -> float:
    """Bytes that each rank sends; zero1 and zero2 gather the updated parameters in their own dtype.

    zero2 and zero3 reduce every micro-batch, the other strategies the accumulated sum.
    """
    sent = formulas.traffic(strategy, num_microbatches, "every" if strategy in ("zero2", "zero3") else "once")
    element_bytes = job.assumptions.element_bytes
    param_bytes = job.per_parameter.parameter if strategy in ("zero1", "zero2") else element_bytes
    num_params = job.workload.num_params / job.tp
    return formulas.sent_bytes(sent, num_params, job.num_data_ranks, element_bytes, param_bytes)


def _rates(job: TrainingJob, fsdp: int, tp: int) -> DeviceRates:
    """A device's rates; products at that of their shapes, for as many tokens as the table has rows at most."""
    rates, run = job.cluster.rates(fsdp, tp), _run(job, _TABLE_TOKENS)
    if run is None or not run.chip.is_measured or not job.workload.products:
        return rates
    flops = sum(2.0 * count * rows * columns for count, rows, columns in job.workload.products)
    return rates._replace(flops_per_s=flops * _TABLE_TOKENS / product_seconds(run))


def _run(job: TrainingJob, tokens: int, num_microbatches: int = 1) -> Run | None:
    """What ``estimate`` takes, with ``tokens`` of a rank; None on a machine by hand."""
    if (chip := job.cluster.chip) is None:
        return None
    element_bytes = int(job.assumptions.element_bytes)
    return Run(
        job.workload, chip, job.cluster.products, job.cluster.network, job.num_data_ranks, tokens, num_microbatches,
        ("bucketed", "zero1", "zero2", "zero3")[job.stage], DEFAULT_BUCKET_MB, element_bytes, element_bytes,
    )  # fmt: skip


def _tokens(job: TrainingJob, least: float) -> int:
    """The given tokens, or the smallest compute-bound batch rounded up to whole sequences."""
    if job.tokens is not None:
        return job.tokens
    if math.isinf(least):
        raise ValueError(f"tokens must be given: with tp (={job.tp}) no batch is compute-bound")
    pieces = job.least_tokens * (job.accumulation_steps or 1)
    least_whole = math.ceil(least) if job.sequence_length == 1 else math.ceil(least / pieces) * pieces
    return max(least_whole, pieces)


def _bytes_per_device(job: TrainingJob, tokens: int) -> dict[str, float]:
    """Bytes of a device by component, in one micro-batch.

    The largest bucket by default is a unit at stage 3, else an eighth of all gradients, a tensor or 25 MiB.
    """
    workload, element_bytes = job.workload, job.assumptions.element_bytes
    state = formulas.state_bytes(workload.num_params / job.tp, job.stage, job.fsdp, job.held)
    gathered = formulas.gathered_bytes(workload.unit_params, element_bytes, _GATHERED_UNITS, job.tp)
    kept = workload.kept_per_token, workload.kept_cut_per_token
    if job.stage == 3:
        bucket = max(workload.unit_params) * element_bytes / job.tp
    else:
        every = workload.num_params / job.tp * element_bytes
        largest = max(workload.tensor_elements) * element_bytes / job.tp
        bucket = min(every, max(DEFAULT_BUCKET_MB * MIB, every / 8, largest))
    return {
        **state._asdict(),
        "gathered_parameters": gathered if job.gathers else 0.0,
        "gradient_buckets": bucket if job.num_data_ranks > 1 else 0.0,
        "activations": formulas.activation_bytes(tokens / job.num_data_ranks, *kept, element_bytes, job.tp),
    }


def _fewest_steps(job: TrainingJob, tokens: int, components: dict[str, float]) -> int | None:
    """Fewest micro-batches of equal size that fit; None if no number does."""
    most = tokens // job.least_tokens
    others = sum(components.values()) - components["activations"]
    least = formulas.least_ranks(components["activations"], others, job.cluster.memory_bytes)
    if least > most:
        return None
    return next(steps for steps in range(int(least), most + 1) if job.sequence_length == 1 or most % steps == 0)


def _min_devices(job: TrainingJob, components: dict[str, float]) -> int | None:
    num_params = job.workload.num_params / job.tp
    whole = formulas.state_bytes(num_params, job.stage, math.inf, job.held).total  # what no rank shares
    cut = num_params * job.held.total - whole
    temporary = sum(components[name] for name in ("gathered_parameters", "gradient_buckets", "activations"))
    ranks = formulas.least_ranks(cut, whole + temporary, job.cluster.memory_bytes)
    return int(ranks) * job.tp if math.isfinite(ranks) else None
