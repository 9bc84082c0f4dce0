"""Training steps as rows, each with everything needed to read it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxddp.training.clock import summarize

from ..harness.run import FAILED, NOT_RUN
from .arithmetic import param_bytes
from .measure import PEERS, Measured, SideResult, TrainingSetup

# A wrong divisor is wrong by a factor of the number of ranks at least; what weights apart by rounding do to losses and
# norms over some 20 steps was seen to be under 0.1 %.
METRIC_TOLERANCE = 0.01
# Of bfloat16, whose roundings are 0.4 % each.
_BF16_METRIC_TOLERANCE = 0.05
# What a peer raises that its framework's version or this machine does not have; anything else is a fault.
_NOT_THERE = ("NotImplementedError: ", "ImportError: ", "ModuleNotFoundError: ")


def step_rows(framework: str, setup: TrainingSetup, side: SideResult) -> list[dict[str, Any]]:
    """Turns what one framework's processes found into rows, each with everything needed to read it alone.

    Returns:
        A row for each strategy and peer of the framework, in the setup's order; ``check`` says whether it may be
        believed, or why it was not measured.
    """
    of_all = {
        "framework": framework,
        "backend": side.backend,
        "device": side.device,
        "ranks": side.ranks,
        "kind": side.kind,
        "num_ranks": side.num_ranks,
        "model": setup.model,
        "dtype": setup.dtype,
        "params_bytes": sum(array.size for array in side.trained.values()) * param_bytes(setup.dtype),
        "global_batch": setup.global_batch,
        "microbatch": setup.global_batch // side.num_ranks,
        "num_timed": setup.num_timed,
        "in_turns": side.in_turns,
        "tolerance": setup.tolerance,
        "versions": side.versions,
    }
    rows = []
    for spec in setup.of(framework):
        row = of_all | {"strategy": spec.name, "bucket_mb": spec.bucket_mb}
        measured = side.measured.get(spec.label)
        if measured is None:
            said = side.failed[spec.label]
            is_missing = spec.name in PEERS[framework] and said.startswith(_NOT_THERE)
            rows.append(row | {"check": f"{NOT_RUN if is_missing else FAILED}{said}"})
            continue
        found, silent = check(measured, setup), spec.without_communication[0]
        if found == "ok" and silent in side.failed:
            found = f"{FAILED}{side.failed[silent]}, without its communication"
        rows.append(row | _measured_fields(measured) | {"check": found})
    return rows


def _measured_fields(measured: Measured) -> dict[str, Any]:
    timings, exposed = measured.timings, measured.exposed
    fields: dict[str, Any] = {
        "planned": measured.planned,
        "compiled": measured.found,
        "first_loss": measured.metrics[0].loss,
        "loss": measured.metrics[-1].loss,
        "reference_loss": measured.reference[-1].loss,
        "max_weight_difference": measured.max_weight_difference,
        "max_metric_difference": measured.max_metric_difference,
        **timings._asdict(),
        "exposed_ms": exposed and exposed.median_ms,
        "exposed_p10_ms": exposed and exposed.p10_ms,
        "exposed_p90_ms": exposed and exposed.p90_ms,
        "exposed_share": exposed and exposed.median_ms / timings.median_ms,
        "rounds_ms": _in_ms(measured.seconds),
        "baseline_rounds_ms": _in_ms(measured.baseline_seconds),
    }
    for name, seconds in (("in_a_row", measured.in_a_row_seconds), ("device", measured.device_seconds)):
        if seconds:
            fields |= {f"{name}_ms": summarize(seconds).median_ms, f"{name}_rounds_ms": _in_ms(seconds)}
    if measured.no_device_seconds:
        fields |= {"device_ms": None, "no_device_ms": measured.no_device_seconds}
    return fields


def _in_ms(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * one, 4) for one in seconds]


def check(measured: Measured, setup: TrainingSetup) -> str:
    """``"ok"``, or what is wrong with a run."""
    if measured.planned is not None and sorted(measured.planned) != sorted(measured.found or []):
        return f"WRONG: {len(measured.planned)} collectives planned, others found"
    if setup.tolerance is not None and not measured.max_weight_difference <= setup.tolerance:  # NaN is wrong too
        return f"WRONG: weights differ by more than {setup.tolerance:.0e}"
    if not measured.max_metric_difference <= (bound := metric_tolerance(setup.dtype)):
        return f"WRONG: loss or gradient norm differs by more than {bound:.0%}"
    if setup.must_learn and measured.metrics[-1].loss >= measured.metrics[0].loss:
        return "WRONG: the loss did not fall"
    return "ok"


def metric_tolerance(dtype: str) -> float:
    """How far losses and gradient norms may be apart, relative to their values."""
    return _BF16_METRIC_TOLERANCE if dtype == "bf16" else METRIC_TOLERANCE
