"""The output of ``plan``: lines of numbers, or one JSON object; of one's own training, a row for each stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..communication.buckets import MIB
from ..network import GB
from ..planning.plan import Plan
from .table import count_kinds, paragraph, table

if TYPE_CHECKING:  # imports JAX, which a plan alone does not need
    from ..instruments.verify import StagePlan
    from ..planning.chips import Target


def show(plan: Plan, model: str) -> None:
    """Prints a plan."""
    job = plan.job
    replicas = f" x {job.dp} replicas" if job.dp > 1 else ""
    how = f"FSDP {job.fsdp}" if job.stage == 3 else f"ZeRO stage {job.stage} over {job.fsdp} ranks"
    print(f"{model} on {job.cluster.name}: {how} x TP {job.tp}{replicas}, {plan.tokens:,} tokens a step")
    print(paragraph(f"Assumed: {'; '.join(_assumptions(plan))}."))
    print(f"\n{table(('', ''), lines(plan), left=('',))}")
    for note in _notes(plan):
        print(paragraph(f"Note: {note}."))


def lines(plan: Plan) -> list[tuple[str, str]]:
    """The numbers of a plan in the order in which they are shown; a label is indented if it is a part of another."""
    job, found, times, best = plan.job, plan.bytes_per_device, plan.times, plan.best_split
    spare = job.cluster.memory_bytes - plan.total_bytes
    verdict = f"yes, {_gb(spare)} to spare" if plan.fits else f"no, {_gb(-spare)} too much"
    shown = [
        ("fits", f"{verdict}: {_gb(plan.total_bytes)} of {_gb(job.cluster.memory_bytes)} a device"),
        *((f"  {name.replace('_', ' ')}", _gb(num_bytes)) for name, num_bytes in found.items()),
        ("accumulation steps", "none fit" if plan.accumulation_steps is None else str(plan.accumulation_steps)),
        ("least devices", "none" if plan.min_devices is None else f"{plan.min_devices:,}"),
        ("compute-bound", f"{'yes' if plan.compute_bound else 'no'}: {_from(plan.min_tokens)}"),
        ("  compute", f"{_ms(times.compute_s)} a micro-batch"),
        ("  FSDP", _ms(times.fsdp_s)),
        ("  TP", _ms(times.tp_s)),
        ("  DP", _ms(times.dp_s)),
        ("  communication", _ms(times.communication_s(job.assumptions))),
        ("best split", f"FSDP {best.fsdp} x TP {best.tp}: {_from(best.tokens)}"),
    ]
    if (buckets := plan.buckets) is None:
        shown.append(("best bucket", "none: no gradients are reduced"))
    else:
        size = f"{buckets.num_buckets} buckets of up to {buckets.largest_bytes / MIB:.4g} MiB"
        late = f"{_ms(buckets.tail_s)} exposed after the backward"
        shown.append(("best bucket", f"cap of {buckets.cap_mb:.4g} MiB: {size}, {late}"))
        if (equal := buckets.equal) is not None:
            shown.append(("  if buckets were equal", f"{equal.bucket_bytes / MIB:.4g} MiB, {equal.regime}"))
    shown.append(("traffic", "bytes that a rank sends per step to data-parallel peers, by strategy"))
    return shown + [(f"  {name.replace('_', ' ')}", _gb(num_bytes)) for name, num_bytes in plan.traffic_bytes.items()]


def as_json(plan: Plan, model: str) -> dict[str, Any]:
    """A plan for ``json.dumps``: bytes and tokens rounded up, missing answers None."""
    job, buckets, best, given = plan.job, plan.buckets, plan.best_split, plan.job.assumptions
    names = ("passes", "overlapped_axes", "ring_factors", "element_bytes")
    equal = buckets.equal if buckets else None
    return {
        "model": model,
        "target": job.cluster.name,
        "devices": job.cluster.num_devices,
        "fsdp": job.fsdp,
        "tp": job.tp,
        "dp": job.dp,
        "stage": job.stage,
        "params": job.workload.num_params,
        "tokens": plan.tokens,
        "micro_batch": plan.micro_batch,
        "fits": plan.fits,
        "bytes_per_device": {
            **{name: _whole(num_bytes) for name, num_bytes in plan.bytes_per_device.items()},
            "total": _whole(plan.total_bytes),
            "available": _whole(job.cluster.memory_bytes),
        },
        "accumulation_steps": plan.accumulation_steps,
        "min_devices": plan.min_devices,
        "compute_bound": plan.compute_bound,
        "min_tokens": None if plan.min_tokens is None else math.ceil(plan.min_tokens),
        "microbatch_times_s": {name.removesuffix("_s"): float(each) for name, each in plan.times._asdict().items()},
        "best_split": {**best._asdict(), "tokens": math.ceil(best.tokens)},
        "best_bucket_mb": None if buckets is None else buckets.cap_mb,
        "buckets": None if buckets is None else {
            "cap_mb": buckets.cap_mb,
            "count": buckets.num_buckets,
            "largest_mb": buckets.largest_bytes / MIB,
            "tail_s": buckets.tail_s,
            "backward_s": buckets.backward_s,
            "bytes_per_s": buckets.bytes_per_s,
            "latency_s": buckets.latency_s,
            "equal_mb": equal and equal.bucket_bytes / MIB,
            "regime": equal and equal.regime,
        },
        "traffic_bytes_per_step": {name: _whole(num_bytes) for name, num_bytes in plan.traffic_bytes.items()},
        "assumptions": {
            **{name: getattr(given, name) for name in names},
            "state_bytes_per_param": job.held._asdict(),
            **{name: getattr(job.cluster, name) for name in ("flops_per_s", "link_gb_per_s", "latency_us")},
        },
        "notes": _notes(plan),
    }  # fmt: skip


def _assumptions(plan: Plan) -> list[str]:
    given = plan.job.assumptions
    passes = {"forward": "the forward alone", "backward": "the backward alone", "both": "forward and backward"}
    return [
        passes[given.passes],
        f"collectives of different axes {'at the same time' if given.overlapped_axes else 'one after the other'}",
        f"r(n) = {'(n-1)/n' if given.ring_factors else '1'} of a buffer sent",
        f"{given.element_bytes:g} bytes per element sent and kept",
        f"{plan.job.cluster.link_gb_per_s:g} GB/s a device and {plan.job.cluster.latency_us:g} us a call",
        f"products in {plan.job.cluster.products or 'any dtype'} at {plan.job.cluster.flops_per_s:g} FLOP/s",
        "{:g} + {:g} + {:g} + {:g} bytes a parameter (value, gradient, optimizer, sum of micro-batches)".format(
            *plan.job.held
        ),
    ]


def _notes(plan: Plan) -> list[str]:
    job, cluster, found = plan.job, plan.job.cluster, []
    if cluster.torus and not cluster.axes(*job.ranks[:2]).is_exact:
        found.append(
            f"groups of {job.fsdp} and {job.tp} are not products of whole axes of "
            f"{'x'.join(map(str, cluster.torus))}: the number of axes of each is assumed"
        )
    if any(side < 4 for side in cluster.torus):
        found.append("axes of fewer than 4 chips have no wrap-around links: communication is slower than assumed")
    if not cluster.torus:
        pool = 0.75 * cluster.memory_bytes
        needs_more = ", which this plan needs" if plan.total_bytes > pool else ""
        found.append(f"JAX takes {_gb(pool)} of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more{needs_more}")
    if job.gathers and plan.num_microbatches > 1:
        found.append("every micro-batch gathers, so each has to be as large as a compute-bound batch")
    if not job.gathers and job.num_data_ranks > 1 and job.assumptions.passes == "forward":
        found.append("gradients are reduced in the backward, which is not counted")
    return found


def show_stages(plans: Sequence[StagePlan], trainer: str, target: Target) -> None:
    """Prints a row for each stage and, where steps were compiled, a table for each."""
    print(f"{trainer} on {target.spec}: bytes of a device, of {target.chip.memory_bytes:,}\n")
    rows = [
        (f"{plan.stage} {plan.strategy}", *(f"{round(each):,}" for each in _bytes_of(plan).values()),
         count_kinds(plan.collectives))
        for plan in plans if not plan.refused
    ]  # fmt: skip
    heads = ("stage", "parameters", "gradients", "optimizer state", "in all", "sent a step", "collectives")
    print(table(heads, rows, left=("collectives",)))
    for plan in plans:
        if plan.refused:
            print(paragraph(f"{plan.stage} {plan.strategy} refused: {plan.refused}"))
        if plan.rows:
            print(f"\nStage {plan.stage}, {plan.strategy}, compiled for {target.spec}:\n")
            cells = [(row.label, _digits(row.planned), _digits(row.compiled), row.check) for row in plan.rows]
            print(table(("", "planned", "compiled", "check"), cells, left=("check",)))
        for note in plan.notes:
            print(paragraph(f"Note: {note}."))


def _bytes_of(plan: StagePlan) -> dict[str, float]:
    held = {name: getattr(plan, name) for name in ("parameters", "gradients", "optimizer_state", "total")}
    return {**held, "sent": plan.sent_bytes}


def stages_as_json(plans: Sequence[StagePlan], trainer: str, target: Target) -> dict[str, Any]:
    """The stages of a training of one's own as an object for ``json.dumps``; ``verify`` is None without compilation."""
    return {
        "trainer": trainer,
        "target": target.spec,
        "available": target.chip.memory_bytes,
        "stages": [
            {
                "stage": plan.stage,
                "strategy": plan.strategy,
                "refused": plan.refused or None,
                "bytes_per_device": {name: each for name, each in _bytes_of(plan).items() if name != "sent"},
                "sent_bytes_per_step": round(plan.sent_bytes),
                "collectives": [
                    {"kind": kind, "bytes": num_bytes, "count": count}
                    for (kind, num_bytes), count in sorted(Counter(plan.collectives).items())
                ],
                "verify": {
                    "as_planned": plan.holds, "rows": [row._asdict() for row in plan.rows], "notes": list(plan.notes)
                } if plan.rows else None,
            }
            for plan in plans
        ],
    }  # fmt: skip


def _digits(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes:,}"


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
