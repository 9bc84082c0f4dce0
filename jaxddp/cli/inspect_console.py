"""The output of ``inspect``: a table with a row for each step, or one JSON object."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    # Four significant figures for the longest step.
    digits = max(0, 3 - math.floor(math.log10(max(each.simulation.step_s for each in inspections) * 1e3)))
    print(f"\n{table(_HEADS, [_cells(each, digits) for each in inspections], left=('check',))}\n")
    bound = first.bound
    terms = [bound.step_s, bound.compute_s, bound.forward_s, bound.first_gradient_s, bound.all_reduce_s]
    step, compute, forward, gradient, all_reduce = _in_ms(terms, digits)
    print(paragraph(
        f"No schedule can beat the bound, {step} ms: the greater of compute {compute} and forward {forward} "
        f"+ first gradient {gradient} + all-reduce of everything {all_reduce}."
    ))  # fmt: skip
    chip = first.target.chip
    pool = f"; JAX takes {chip.pool_bytes / 1e9:.1f} unless XLA_PYTHON_CLIENT_MEM_FRACTION is set"
    print(paragraph(f"{_LEGEND}, of {chip.memory_bytes / 1e9:.1f}{pool if chip.platform == 'gpu' else ''}."))
    for inspection in inspections:
        for note in inspection.notes:
            print(paragraph(f"{inspection.strategy}: {note}"))
    if folder is not None:
        print(f"\n{folder}: timeline.png")


def as_json(inspections: list[Inspection]) -> dict[str, Any]:
    """The first inspection as one object, with the others in its list ``compare``."""
    first, *others = map(_object, inspections)
    return {**first, "compare": others}


def _object(inspection: Inspection) -> dict[str, Any]:
    overlap, simulation = inspection.schedule.overlap(), inspection.simulation
    network = inspection.network
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


def _cells(inspection: Inspection, digits: int) -> list[str]:
    overlap, simulation = inspection.schedule.overlap(), inspection.simulation
    total = overlap.num_bytes or 1
    times = (simulation.compute_s, simulation.communication_s, simulation.exposed_s, simulation.step_s)
    return [
        inspection.strategy,
        "-" if inspection.as_planned is None else count_kinds(inspection.planned),
        count_kinds(inspection.compiled),
        _CHECKS[inspection.as_planned],
        f"{overlap.num_bytes / MIB:.1f}",
        "-" if overlap.first_start_fraction is None else f"{overlap.first_start_fraction:.0%}",
        *(f"{share / total:.0%}" for share in (overlap.bytes_in_flight, overlap.bytes_started_after_backward)),
        *_in_ms(times, digits),
        f"{simulation.step_s / inspection.bound.step_s:.3f}",
        f"{inspection.memory['peak'] / 1e9:.1f}",
    ]


def _in_ms(seconds: Iterable[float], digits: int) -> list[str]:
    return [f"{each * 1e3:.{digits}f}" for each in seconds]
