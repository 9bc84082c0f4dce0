"""What a user sees of a plan: lines of numbers with their units, on request with their formulas, or one JSON object.

Where the step was compiled, a table of planned and compiled bytes stands below.
"""

from __future__ import annotations

import math
import sys
import textwrap
from typing import TYPE_CHECKING, Any, TextIO

from ..planning.bucket_choice import Buckets
from ..planning.buckets import MIB
from ..planning.lines import assumptions, lines, notes, symbols
from ..planning.plan import Plan

if TYPE_CHECKING:  # it needs the whole library, which a plan alone does not wait for
    from ..inspection.verification import Row, Verification

_LABEL_WIDTH = 25
_NUMBER_WIDTH = 20
_WIDTH = 120


def show(plan: Plan, model: str, *, explain: bool = False, file: TextIO | None = None) -> None:
    """Writes a plan.

    Args:
        plan: The answers.
        model: The model's name.
        explain: Whether each number is followed by its formula.
        file: Where to write; standard output when None.
    """
    file = file or sys.stdout
    job = plan.job
    replicas = f" x {job.dp} replicas" if job.dp > 1 else ""
    how = f"FSDP {job.fsdp}" if job.stage == 3 else f"ZeRO stage {job.stage} over {job.fsdp} ranks"
    print(f"{model} on {job.cluster.name}: {how} x TP {job.tp}{replicas}, {plan.tokens:,} tokens a step", file=file)
    print(textwrap.fill(f"Assumed: {'; '.join(assumptions(plan))}.", _WIDTH), file=file)
    if explain:
        letters = "; ".join(f"{letter} = {value}" for letter, value in symbols(plan).items())
        print(textwrap.fill(f"Letters: {letters}.", _WIDTH), file=file)
    print(file=file)
    for line in lines(plan):
        print(f"{line.label:<{_LABEL_WIDTH}}{line.text}", file=file)
        if explain:
            margin = " " * _LABEL_WIDTH
            print(textwrap.fill(f"= {line.formula}", _WIDTH, initial_indent=margin, subsequent_indent=f"{margin}  "),
                  file=file)  # fmt: skip
    for note in notes(plan):
        print(f"Note: {note}.", file=file)


def show_verification(verification: Verification, file: TextIO | None = None) -> None:
    """Writes a plan's formulas beside its compiled step, as a table in bytes.

    Args:
        verification: What was compared.
        file: Where to write; standard output when None.
    """
    file = file or sys.stdout
    job = verification.plan.job
    print(f"\nCompiled for {job.cluster.name}, bytes of a device:\n", file=file)
    head = (f"{name:>{_NUMBER_WIDTH}}" for name in ("planned", "compiled", "difference"))
    print(f"{'':<{_LABEL_WIDTH}}{''.join(head)}  check", file=file)
    for row in verification.rows:
        numbers = (_digits(row.planned), _digits(row.compiled), _digits(row.difference, "+"))
        cells = "".join(f"{number:>{_NUMBER_WIDTH}}" for number in numbers)
        print(f"{row.label:<{_LABEL_WIDTH}}{cells}  {row.check}".rstrip(), file=file)
    if verification.refusal is not None:
        print(f"Refused by the compiler: {verification.refusal}.", file=file)
    for note in verification.notes:
        print(f"Note: {note}.", file=file)


def verification_object(verification: Verification) -> dict[str, Any]:
    """Gives a verification as one object.

    Args:
        verification: What was compared.

    Returns:
        What ``json.dumps`` takes; absent numbers are None.
    """
    refusal = verification.refusal
    return {
        "tokens": verification.plan.tokens,
        "as_planned": verification.holds,
        "rows": [_row_object(row) for row in verification.rows],
        "collectives": [
            {"kind": kind, "bytes": num_bytes, "ranks": ranks, "count": count}
            for (kind, num_bytes, ranks), count in sorted(verification.collectives.items())
        ],
        "refused": None
        if refusal is None
        else {"needed_bytes": refusal.needed_bytes, "available_bytes": refusal.available_bytes},
        "notes": list(verification.notes),
    }


def as_json(plan: Plan, model: str, *, explain: bool = False) -> dict[str, Any]:
    """Gives a plan as one object.

    Args:
        plan: The answers.
        model: The model's name.
        explain: Whether to add the formulas.

    Returns:
        What ``json.dumps`` takes; bytes and tokens are rounded up to whole ones, absent answers are None.
    """
    job, buckets, best, given = plan.job, plan.buckets, plan.best_split, plan.job.assumptions
    found: dict[str, Any] = {
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
        "buckets": None if buckets is None else _bucket_object(buckets),
        "traffic_bytes_per_step": {name: _whole(num_bytes) for name, num_bytes in plan.traffic_bytes.items()},
        "assumptions": {
            "passes": given.passes,
            "overlapped_axes": given.overlapped_axes,
            "ring_factors": given.ring_factors,
            "element_bytes": given.element_bytes,
            "state_bytes_per_param": job.per_parameter._asdict(),
            "flops_per_s": job.cluster.flops_per_s,
            "link_gb_per_s": job.cluster.link_gb_per_s,
            "latency_us": job.cluster.latency_us,
        },
        "notes": notes(plan),
    }
    if explain:
        found["formulas"] = {line.label.strip(): f"{line.text} = {line.formula}" for line in lines(plan)}
        found["letters"] = symbols(plan)
    return found


def _bucket_object(buckets: Buckets) -> dict[str, Any]:
    equal = buckets.equal
    return {
        "cap_mb": buckets.cap_mb,
        "count": buckets.num_buckets,
        "largest_mb": buckets.largest_bytes / MIB,
        "tail_s": buckets.tail_s,
        "backward_s": buckets.backward_s,
        "bytes_per_s": buckets.bytes_per_s,
        "latency_s": buckets.latency_s,
        "equal_mb": None if equal is None else equal.bucket_bytes / MIB,
        "regime": None if equal is None else equal.regime,
    }


def _row_object(row: Row) -> dict[str, Any]:
    numbers = {"planned": row.planned, "compiled": row.compiled, "difference": row.difference}
    rounded = {name: None if number is None else round(number) for name, number in numbers.items()}
    return {"label": row.label, **rounded, "check": row.check, "as_planned": row.holds}


def _digits(num_bytes: float | None, sign: str = "") -> str:
    if num_bytes is None:
        return "-"
    whole = round(num_bytes)
    return format(whole, f"{sign if whole else ''},")


def _whole(num_bytes: float) -> int:
    """Rounds up, but for what floating point adds to a whole number."""
    return math.ceil(num_bytes * (1 - 1e-12))
