"""The output of ``plan``: a table of numbers, or one JSON object."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ..communication.buckets import MIB
from ..network import GB
from ..planning.plan import Plan
from ..planning.products import rates_in_words
from ..table import paragraph, table

_PASSES = {"forward": "the forward alone", "backward": "the backward alone", "both": "forward and backward"}


def show(plan: Plan, model: str) -> None:
    """Prints a plan."""
    job = plan.job
    replicas = f" x {job.dp} replicas" if job.dp > 1 else ""
    how = f"FSDP {job.fsdp}" if job.stage == 3 else f"ZeRO stage {job.stage} over {job.fsdp} ranks"
    print(f"{model} on {job.cluster.name}: {how} x TP {job.tp}{replicas}, {plan.tokens:,} tokens a step")
    print(paragraph(f"Assumed: {_assumptions(plan)}."))
    print(f"\n{table(('', ''), _lines(plan), left=('',))}")
    for note in _notes(plan):
        print(paragraph(f"Note: {note}."))


def _lines(plan: Plan) -> list[tuple[str, str]]:
    """The numbers of a plan in the order in which they are shown; a label is indented if it is a part of another."""
    job, best = plan.job, plan.best_split
    spare = job.cluster.memory_bytes - plan.total_bytes
    verdict = f"yes, {_gb(spare)} to spare" if plan.fits else f"no, {_gb(-spare)} too much"
    return [
        ("fits", f"{verdict}: {_gb(plan.total_bytes)} of {_gb(job.cluster.memory_bytes)} a device"),
        *((f"  {name.replace('_', ' ')}", _gb(num_bytes)) for name, num_bytes in plan.bytes_per_device.items()),
        ("accumulation steps", "none fit" if plan.accumulation_steps is None else str(plan.accumulation_steps)),
        ("least devices", "none" if plan.min_devices is None else f"{plan.min_devices:,}"),
        ("compute-bound", f"{'yes' if plan.compute_bound else 'no'}: {_from(plan.min_tokens)}"),
        ("  compute", f"{_ms(plan.times.compute_s)} a micro-batch"),
        ("  FSDP", _ms(plan.times.fsdp_s)),
        ("  TP", _ms(plan.times.tp_s)),
        ("  DP", _ms(plan.times.dp_s)),
        ("  communication", _ms(plan.times.communication_s(job.assumptions))),
        *_step(plan),
        ("best split", f"FSDP {best.fsdp} x TP {best.tp}: {_from(best.tokens)}"),
        ("best buckets", _buckets(plan)),
        ("traffic", "bytes that a rank sends per step to data-parallel peers, by strategy"),
        *((f"  {name.replace('_', ' ')}", _gb(num_bytes)) for name, num_bytes in plan.traffic_bytes.items()),
    ]


def _step(plan: Plan) -> list[tuple[str, str]]:
    if (step := plan.step) is None:
        return []
    parts = ", ".join(f"{name.removesuffix('_s')} {_ms(seconds)}" for name, seconds in step._asdict().items())
    return [("step", f"{_ms(step.step_s)}, an estimate: {parts}")]


def _buckets(plan: Plan) -> str:
    if plan.job.num_data_ranks == 1:
        return "none: no gradients are reduced"
    if (best := plan.buckets) is None:
        return "the smaller the better: a call has no latency"
    size = f"{best.num_buckets:,.0f} of {best.bucket_bytes / MIB:,.1f} MiB"
    return f"{size}, if they are equal: {_ms(best.tail_s)} exposed after the backward, {best.regime}"


def as_json(plan: Plan, model: str) -> dict[str, Any]:
    """A plan for ``json.dumps``: bytes and tokens rounded up, missing answers None."""
    job, buckets = plan.job, plan.buckets
    held = plan.bytes_per_device | {"total": plan.total_bytes, "available": job.cluster.memory_bytes}
    return {
        "model": model,
        "target": job.cluster.name,
        "devices": job.cluster.num_devices,
        **{name: getattr(job, name) for name in ("fsdp", "tp", "dp", "stage")},
        "params": job.workload.num_params,
        **{name: getattr(plan, name) for name in ("tokens", "micro_batch", "fits", "accumulation_steps", "min_devices",
                                                  "compute_bound")},
        "bytes_per_device": {name: _whole(num_bytes) for name, num_bytes in held.items()},
        "min_tokens": None if plan.min_tokens is None else math.ceil(plan.min_tokens),
        "microbatch_times_s": {name.removesuffix("_s"): float(each) for name, each in plan.times._asdict().items()},
        "best_split": {**plan.best_split._asdict(), "tokens": math.ceil(plan.best_split.tokens)},
        "step_s": plan.step and {**plan.step._asdict(), "step_s": plan.step.step_s},
        "best_bucket_mb": buckets and buckets.bucket_bytes / MIB,
        "buckets": buckets and buckets._asdict(),
        "traffic_bytes_per_step": {name: _whole(num_bytes) for name, num_bytes in plan.traffic_bytes.items()},
        "assumptions": {
            **asdict(job.assumptions),
            "state_bytes_per_param": job.held._asdict(),
            "flops_per_s": plan.flops_per_s,
            "rates": job.cluster.chip and rates_in_words(job.cluster.chip),
            "link_gb_per_s": job.cluster.network.gb_per_s,
            "latency_us": job.cluster.network.latency_us,
            "network_source": job.cluster.network.source,
        },
        "notes": _notes(plan),
    }  # fmt: skip


def _assumptions(plan: Plan) -> str:
    given, cluster = plan.job.assumptions, plan.job.cluster
    held = " + ".join(f"{num_bytes:g}" for num_bytes in plan.job.held)
    return "; ".join([
        _PASSES[given.passes],
        f"collectives of different axes {'at the same time' if given.overlapped_axes else 'one after the other'}",
        f"r(n) = {'(n-1)/n' if given.ring_factors else '1'} of a buffer sent",
        f"{given.element_bytes:g} bytes per element sent and kept",
        f"{cluster.network.gb_per_s:.4g} GB/s a device and {cluster.network.latency_us:.3g} us a call"
        + (f", measured ({cluster.network.source})" if cluster.network.source else ""),
        f"products in {cluster.products or 'any dtype'} at {plan.flops_per_s:g} FLOP/s",
        *([rates_in_words(cluster.chip)] if cluster.chip else []),
        f"{held} bytes a parameter (value, gradient, optimizer, sum of micro-batches)",
    ])  # fmt: skip


def _notes(plan: Plan) -> list[str]:
    job, torus = plan.job, plan.job.cluster.torus
    found = []
    if torus and not job.cluster.axes(*job.ranks[:2]).is_exact:
        found.append(
            f"groups of {job.fsdp} and {job.tp} are not products of whole axes of {'x'.join(map(str, torus))}: the "
            "number of axes of each is assumed"
        )
    if any(side < 4 for side in torus):
        found.append("axes of fewer than 4 chips have no wrap-around links: communication is slower than assumed")
    pool = 0.75 * job.cluster.memory_bytes
    if not torus and plan.total_bytes > pool:
        found.append(f"JAX takes {_gb(pool)} of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more")
    if job.gathers and plan.num_microbatches > 1:
        found.append("every micro-batch gathers, so each has to be as large as a compute-bound batch")
    if not job.gathers and job.num_data_ranks > 1 and job.assumptions.passes == "forward":
        found.append("gradients are reduced in the backward, which is not counted")
    return found


def _whole(num_bytes: float) -> int:
    """Rounds up, ignoring floating-point noise on a whole number."""
    return math.ceil(num_bytes * (1 - 1e-12))


def _from(min_tokens: float | None) -> str:
    if min_tokens is None:
        return "no batch is large enough"
    return f"from {math.ceil(min_tokens):,} tokens on" if min_tokens else "at any batch"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= 1e7 or num_bytes == 0 else f"{num_bytes / 1e6:.3g} MB"


def _ms(seconds: Any) -> str:
    return f"{float(seconds) * 1e3:.4g} ms"
