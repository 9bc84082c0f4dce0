"""The output of ``plan``: one JSON object, or the same numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..communication.buckets import MIB
from ..network import GB
from ..planning.plan import Plan
from ..planning.products import rates_in_words
from ..table import paragraph, table


def show(plan: Plan, model: str) -> None:
    """Prints a plan."""
    found = as_json(plan, model)
    notes = found.pop("notes")
    print(f"{model} on {found.pop('target')}\n\n{table(('', ''), list(_rows(found)), left=('',))}")
    for note in notes:
        print(paragraph(f"Note: {note}."))


def _rows(found: Mapping[str, Any], indent: str = "", unit: str = "") -> Iterator[tuple[str, str]]:
    """Names and numbers, in the unit that the name says, or that of the group which they are part of."""
    for name, value in found.items():
        is_time = name.endswith("_s") and not name.endswith("per_s")
        of, words = "ms" if is_time else "bytes" if "bytes" in name else unit, name.replace("_", " ")
        label = f"{indent}{words.removesuffix(' s') if is_time else words}"
        if isinstance(value, Mapping):
            yield label, ""
            yield from _rows(value, f"{indent}  ", of)
        elif value is None or isinstance(value, (str, bool)):
            yield label, value if isinstance(value, str) else "none" if value is None else "yes" if value else "no"
        elif of == "ms":
            yield label, f"{value * 1e3:.4g} ms"
        elif of == "bytes" and value >= 1e5:
            yield label, f"{value / GB:.2f} GB" if value >= 1e7 else f"{value / 1e6:.3g} MB"
        else:
            yield label, f"{value:,.{0 if value == int(value) else 3}f}"


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
        found.append(f"JAX takes {pool / GB:.2f} GB of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more")
    if job.gathers and plan.num_microbatches > 1:
        found.append("every micro-batch gathers, so each has to be as large as a compute-bound batch")
    if not job.gathers and job.num_data_ranks > 1 and job.assumptions.passes == "forward":
        found.append("gradients are reduced in the backward, which is not counted")
    return found


def _whole(num_bytes: float) -> int:
    """Rounds up, ignoring floating-point noise on a whole number."""
    return math.ceil(num_bytes * (1 - 1e-12))
