"""The output of ``inspect``: one JSON object, or its numbers as a table with a row for each step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..communication.buckets import MIB
from ..instruments.inspect import Inspection
from ..planning.machine import network_in_words
from ..table import count_kinds, paragraph, table

_HEADS = (
    "strategy", "planned", "compiled", "check", "volume\nMiB", "first\nstart", "in\nflight", "late", "compute\nms",
    "comm\nms", "exposed\nms", "step\nms", "step\n/ bound", "peak\nGB",
)  # fmt: skip
_LEGEND = (
    "AR all-reduce, RS reduce-scatter, AG all-gather. First start: share of the backward's FLOPs done before the first "
    "collective. In flight: share of the volume that starts while the backward still computes; late: after it. "
    "Exposed: step - compute. Peak: memory of one device"
)
_CHECKS = {None: "-", True: "ok", False: "NOT AS PLANNED"}


def show(inspections: list[Inspection], model: str, folder: Path | None) -> None:
    """Prints the table and the picture's folder; ``model`` is a model's name or a training's."""
    first = inspections[0]
    print(paragraph(f"{model} on {first.title}"))
    print(paragraph(first.rates))
    found = [_object(each) for each in inspections]
    # Four significant figures for the longest step.
    digits = max(0, 3 - math.floor(math.log10(max(each["step_ms"] for each in found))))
    print(f"\n{table(_HEADS, [_cells(each, digits) for each in found], left=('check',))}\n")
    bound, chip = first.bound, first.target.chip
    terms = bound.step_s, bound.compute_s, bound.forward_s, bound.first_gradient_s, bound.all_reduce_s
    step, compute, forward, gradient, all_reduce = (f"{seconds * 1e3:.{digits}f}" for seconds in terms)
    print(paragraph(
        f"No schedule can beat the bound, {step} ms: the greater of compute {compute} and forward {forward} "
        f"+ first gradient {gradient} + all-reduce of everything {all_reduce}."
    ))  # fmt: skip
    pool = f"; JAX takes {chip.pool_bytes / 1e9:.1f} unless XLA_PYTHON_CLIENT_MEM_FRACTION is set"
    print(paragraph(f"{_LEGEND}, of {chip.memory_bytes / 1e9:.1f}{pool if chip.platform == 'gpu' else ''}."))
    for each in found:
        for note in each["notes"]:
            print(paragraph(f"{each['strategy']}: {note}"))
    if folder is not None:
        print(f"\n{folder}: timeline.png")


def as_json(inspections: list[Inspection]) -> dict[str, Any]:
    """The first inspection as one object, with the others in its list ``compare``."""
    first, *others = map(_object, inspections)
    return {**first, "compare": others}


def _object(inspection: Inspection) -> dict[str, Any]:
    overlap, simulation, network = inspection.schedule.overlap(), inspection.simulation, inspection.network
    return {
        "strategy": inspection.strategy,
        "target": inspection.target.spec,
        "devices": inspection.target.num_devices,
        "network_gb_per_s": network.host_gb_per_s or network.gb_per_s,
        "network": network_in_words(inspection.target, network),
        "latency_us": network.latency_us,
        "rates": inspection.rates,
        "product_dtypes": inspection.product_dtypes,
        "planned": [{"kind": kind, "bytes": num_bytes} for kind, num_bytes in inspection.planned],
        "compiled": [{"kind": kind, "bytes": num_bytes} for kind, num_bytes in inspection.compiled],
        "as_planned": inspection.as_planned,
        "bytes_started_after_backward": overlap.bytes_started_after_backward,
        "bytes_in_flight_during_backward": overlap.bytes_in_flight,
        "first_start_fraction": overlap.first_start_fraction,
        "step_ms": simulation.step_s * 1e3,
        "compute_ms": simulation.compute_s * 1e3,
        "comm_ms": simulation.communication_s * 1e3,
        "exposed_ms": simulation.exposed_s * 1e3,
        "lower_bound_ms": inspection.bound.step_s * 1e3,
        "memory": inspection.memory,
        "notes": inspection.notes,
    }


def _cells(found: dict[str, Any], digits: int) -> list[str]:
    planned, compiled = ([(one["kind"], one["bytes"]) for one in found[name]] for name in ("planned", "compiled"))
    total, first = sum(num_bytes for _, num_bytes in compiled), found["first_start_fraction"]
    shares = (found["bytes_in_flight_during_backward"], found["bytes_started_after_backward"])
    return [
        found["strategy"], "-" if found["as_planned"] is None else count_kinds(planned), count_kinds(compiled),
        _CHECKS[found["as_planned"]], f"{total / MIB:.1f}", "-" if first is None else f"{first:.0%}",
        *(f"{share / (total or 1):.0%}" for share in shares),
        *(f"{found[f'{name}_ms']:.{digits}f}" for name in ("compute", "comm", "exposed", "step")),
        f"{found['step_ms'] / found['lower_bound_ms']:.3f}", f"{found['memory']['peak'] / 1e9:.1f}",
    ]  # fmt: skip
