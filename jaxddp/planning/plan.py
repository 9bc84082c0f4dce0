"""Whether a training step fits a cluster and keeps it busy, by ``formulas.py``, before anything is compiled.

The devices form R replicas of X x Y ranks: Y split each matrix (TP), X share the training state by ZeRO stage and work
on different tokens, as the replicas do. The step is split into the fewest micro-batches that fit into memory.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..arguments import check_integer
from ..communication.buckets import DEFAULT_BUCKET_MB, MIB, dtype_bytes
from ..network import GB, Network
from . import formulas
from .chips import Target
from .estimate import Run, estimate, product_seconds
from .formulas import FP32, Assumptions, DeviceRates, PerParameter
from .machine import link_rates
from .products import rates_in_words
from .workload import Workload

_TABLE_TOKENS = 4096  # rows of the largest measured products
_GATHERED_UNITS = 3  # at the same time at stage 3: one in use, two prefetched


@dataclass
class TrainingJob:
    """What to plan: a model on a target. A ValueError if numbers are out of range, or do not divide each other."""

    workload: Workload
    target: Target  # its chip has the rates and the memory to plan with
    network: Network  # what a device sends; on a torus, over one of its axes
    fsdp: int  # X
    tp: int = 1  # Y
    tokens: int | None = None  # B, per step; None for the smallest compute-bound batch
    sequence_length: int = 1  # tokens that must stay on one rank; 1 for a model without sequences
    stage: int = 3  # of ZeRO: 0 shares nothing, 1 the optimizer state, 2 also gradients, 3 also parameters
    per_parameter: PerParameter = FP32
    dtype: str = "bfloat16"  # of matrix products, activations and communication

    def __post_init__(self) -> None:
        for name in ("fsdp", "tp", "sequence_length", "tokens"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value)
        self.num_devices, self.products = self.target.num_devices, self.target.chip.product_dtype(self.dtype)
        if self.num_devices % (self.fsdp * self.tp):
            whole = f"{self.num_devices} devices of {self.target.spec}"
            raise ValueError(f"fsdp x tp (={self.fsdp} x {self.tp}) must divide the {whole}")
        self.num_data_ranks = self.num_devices // self.tp  # X R work on different tokens
        self.dp = self.num_data_ranks // self.fsdp  # R
        self.least_tokens = self.num_data_ranks * self.sequence_length
        self.gathers = self.stage == 3 and self.fsdp > 1  # parameters, in every micro-batch
        # Groups that gather parameters, split matrices and reduce gradients.
        self.ranks = (self.fsdp, self.tp, self.dp) if self.gathers else (1, self.tp, self.num_data_ranks)
        # Gathers of the forward are held against it, or sums of gradients against the backward.
        passes = "backward" if not self.gathers and self.num_data_ranks > 1 else "forward"
        element_bytes = dtype_bytes(self.dtype)
        is_scattered = self.stage in (1, 2) and self.fsdp == self.num_data_ranks
        self.assumptions = Assumptions(
            passes, ring_factors=not self.target.torus, scattered=is_scattered, element_bytes=element_bytes
        )
        self.held = self.per_parameter
        if self.stage == 3 and self.held.optimizer > FP32.optimizer:  # casts masters when it gathers: holds no copies
            optimizer = self.held.optimizer - FP32.parameter
            self.held = self.held._replace(parameter=FP32.parameter, optimizer=optimizer)
        tokens, least = self.tokens or self.least_tokens, self.least_tokens
        if tokens < least or (self.sequence_length > 1 and tokens % least):
            factors = f"{self.sequence_length} x {self.num_data_ranks}"
            rule = f"sequence length x data ranks (={factors}), and in sequences a multiple"
            raise ValueError(f"tokens (={tokens}) must be at least {rule}")


def plan(job: TrainingJob) -> dict[str, Any]:
    """Plans a job, for ``json.dumps``: tokens rounded up, missing answers None."""
    workload, target, network = job.workload, job.target, job.network
    rates = _rates(job, *job.ranks[:2])
    least = formulas.min_tokens(workload, rates, *job.ranks, job.assumptions)
    tokens, held, steps = _batch(job, least)
    num_microbatches = steps or 1
    held["activations"] /= num_microbatches
    total = sum(held.values())
    micro_tokens = tokens / num_microbatches
    times = formulas.times(workload, rates, micro_tokens, *job.ranks, job.assumptions)
    buckets = None  # the best equal ones of whole tensors, unless no gradients are reduced or a call has no latency
    rate, latency_s = gradient_rate(job)
    if latency_s:
        backward_s = 2 * workload.flops_per_token * micro_tokens / (job.num_devices * rates.flops_per_s)
        num_bytes = workload.num_params / job.tp * job.assumptions.element_bytes
        buckets = formulas.best_buckets(backward_s, num_bytes, rate, latency_s, len(workload.tensors))
    step = None  # estimated without tensor parallelism, replicas of shards, or a torus
    if job.tp == 1 and job.fsdp in (1, job.num_data_ranks) and not target.torus:
        step = estimate(_run(job, tokens // (job.num_data_ranks * num_microbatches), num_microbatches))
    notes = []
    if any(side < 4 for side in target.torus):
        notes.append("axes of fewer than 4 chips have no wrap-around links: communication is slower than assumed")
    if total > (pool := target.chip.pool_bytes) and not target.torus:
        notes.append(f"JAX takes {pool / GB:.2f} GB of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more")
    return {
        "target": target.spec,
        "devices": job.num_devices,
        **{name: getattr(job, name) for name in ("fsdp", "tp", "dp", "stage")},
        "params": workload.num_params,
        "tokens": tokens,
        "micro_batch": tokens / (job.least_tokens * num_microbatches),  # sequences, or tokens, of a data rank at once
        "fits": total < target.chip.memory_bytes,
        "accumulation_steps": steps,
        "min_devices": _min_devices(job, held),
        # The others reduce once a step: held against all of its micro-batches.
        "compute_bound": tokens >= least * (num_microbatches if job.gathers or job.stage == 2 else 1),
        "bytes_per_device": {
            **{name: round(num_bytes) for name, num_bytes in held.items()},
            "total": round(total),
            "available": target.chip.memory_bytes,
        },
        "min_tokens": math.ceil(least) if math.isfinite(least) else None,
        "microbatch_times_s": {name.removesuffix("_s"): float(each) for name, each in times._asdict().items()},
        "best_split": _best_split(job),
        "step_s": step and {**step._asdict(), "step_s": step.step_s},
        "best_bucket_mb": buckets and buckets["bucket_bytes"] / MIB,
        "buckets": buckets,  # best of a micro-batch's gradients
        "traffic_bytes_per_step": {name: _traffic_bytes(job, name, num_microbatches) for name in formulas.STRATEGIES},
        "assumptions": {
            **asdict(job.assumptions),
            "state_bytes_per_param": job.held._asdict(),
            "flops_per_s": rates.flops_per_s,  # at which a device computes the products of a forward
            "rates": rates_in_words(target.chip),
            "link_gb_per_s": network.gb_per_s,
            "host_link_gb_per_s": network.host_gb_per_s,
            "latency_us": network.latency_us,
            "network_source": network.source,
        },
        "notes": notes,
    }


def _batch(job: TrainingJob, least: float) -> tuple[int, dict[str, float], int | None]:
    """Tokens, what a device holds, and the fewest micro-batches of equal size that fit; None if no number does."""
    if (tokens := job.tokens) is None:  # the smallest compute-bound batch, in whole sequences
        if math.isinf(least):
            raise ValueError(f"tokens must be given: with tp (={job.tp}) no batch is compute-bound")
        step_tokens = 1 if job.sequence_length == 1 else job.least_tokens
        tokens = max(math.ceil(least / step_tokens) * step_tokens, job.least_tokens)
    held = _bytes_per_device(job, tokens)
    most, others = tokens // job.least_tokens, sum(held.values()) - held["activations"]
    fewest = min(most + 1, formulas.least_ranks(held["activations"], others, job.target.chip.memory_bytes))
    counts = (each for each in range(int(fewest), most + 1) if job.sequence_length == 1 or most % each == 0)
    return tokens, held, next(counts, None)


def _best_split(job: TrainingJob) -> dict[str, int]:
    """The split X Y = N with the smallest compute-bound batch."""
    splits = [(job.num_devices // tp, tp) for tp in range(1, job.num_devices + 1) if job.num_devices % tp == 0]
    least = {each: formulas.min_tokens(job.workload, _rates(job, *each), *each, 1, job.assumptions) for each in splits}
    fsdp, tp = min(least, key=least.__getitem__)
    return {"fsdp": fsdp, "tp": tp, "tokens": math.ceil(least[fsdp, tp])}


def gradient_rate(job: TrainingJob) -> tuple[float, float]:
    """Computes the cost of reducing a bucket: its algorithm bandwidth, inf if nothing is sent, and seconds per call."""
    # Reduce-scattered over all ranks with other tokens, at stage 0 all-reduced, which is twice that.
    halves, ring = 1 if job.stage and job.fsdp > 1 else 2, job.assumptions.ring(job.num_data_ranks)
    if not ring:
        return math.inf, 0.0
    bytes_per_s, *_ = link_rates(job.target, job.network, job.num_data_ranks, job.tp)
    return bytes_per_s / (halves * ring), halves * job.network.latency_us * 1e-6 / 2


def _traffic_bytes(job: TrainingJob, strategy: str, num_microbatches: int) -> int:
    """Bytes that each rank sends; updated parameters, where they are sent, in their own dtype."""
    reduces_every = strategy in ("zero2", "zero3")  # others reduce the accumulated sum
    gradients, parameters = formulas.traffic(strategy, num_microbatches, "every" if reduces_every else "once")
    element_bytes, num_ranks = job.assumptions.element_bytes, job.num_data_ranks
    param_bytes = element_bytes if strategy == "zero3" else job.per_parameter.parameter
    units = gradients * element_bytes + parameters * param_bytes
    return round(units * job.workload.num_params / job.tp * (num_ranks - 1) / num_ranks)


def _rates(job: TrainingJob, fsdp: int, tp: int) -> DeviceRates:
    """A device's rates; products at that of their shapes, for as many tokens as the table has rows at most."""
    flops_per_s = job.target.chip.flops_per_s[job.products]
    if job.target.chip.is_measured:
        flops_per_s = job.workload.products_flops * _TABLE_TOKENS / product_seconds(_run(job, _TABLE_TOKENS))
    return DeviceRates(flops_per_s, *link_rates(job.target, job.network, fsdp, tp))


def _run(job: TrainingJob, tokens: int, num_microbatches: int = 1) -> Run:
    """What ``estimate`` takes, with ``tokens`` of a rank."""
    element_bytes = int(job.assumptions.element_bytes)
    return Run(
        job.workload, job.target.chip, job.products, job.network, job.num_data_ranks, tokens, num_microbatches,
        ("bucketed", "zero1", "zero2", "zero3")[job.stage if job.fsdp > 1 else 0], DEFAULT_BUCKET_MB,
        element_bytes, element_bytes, param_bytes=int(job.per_parameter.parameter),
    )  # fmt: skip


def _bytes_per_device(job: TrainingJob, tokens: int) -> dict[str, float]:
    """Bytes of a device by component, in one micro-batch."""
    workload, element_bytes = job.workload, job.assumptions.element_bytes
    state = formulas.state_bytes(workload.num_params / job.tp, job.stage, job.fsdp, job.held)
    gathered = formulas.gathered_bytes(workload.unit_params, element_bytes, _GATHERED_UNITS, job.tp)
    kept = workload.kept_per_token + workload.kept_cut_per_token / job.tp
    if job.stage == 3:  # the largest bucket by default is a unit, else an eighth of all gradients, a tensor or 25 MiB
        bucket = max(workload.unit_params) * element_bytes / job.tp
    else:
        every = workload.num_params / job.tp * element_bytes
        largest = max(workload.tensor_elements) * element_bytes / job.tp
        bucket = min(every, max(DEFAULT_BUCKET_MB * MIB, every / 8, largest))
    return {
        **state,
        "gathered_parameters": gathered if job.gathers else 0.0,
        "gradient_buckets": bucket if job.num_data_ranks > 1 else 0.0,
        "activations": tokens / job.num_data_ranks * kept * element_bytes,
    }


def _min_devices(job: TrainingJob, components: dict[str, float]) -> int | None:
    """Fewest devices with this Y and this micro-batch per rank; None if none fit."""
    num_params = job.workload.num_params / job.tp
    whole = sum(formulas.state_bytes(num_params, job.stage, math.inf, job.held).values())  # what no rank shares
    temporary = sum(components[name] for name in ("gathered_parameters", "gradient_buckets", "activations"))
    capacity = job.target.chip.memory_bytes
    ranks = formulas.least_ranks(num_params * sum(job.held) - whole, whole + temporary, capacity)
    return int(ranks) * job.tp if math.isfinite(ranks) else None
