"""The output of ``inspect``: a table with a row for each step, or one JSON object."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..communication.buckets import MIB
from ..instruments.inspect import Inspection
from ..instruments.simulate import network_in_words

_COLUMNS = (
    ("strategy", ""), ("planned", ""), ("compiled", ""), ("check", ""), ("volume", "MiB"), ("first", "start"),
    ("in", "flight"), ("late", ""), ("compute", "ms"), ("comm", "ms"), ("exposed", "ms"), ("step", "ms"),
    ("step", "/ bound"), ("peak", "GB"),
)  # fmt: skip
_LEFT = ("strategy", "check")
_LEGEND = (
    "AR all-reduce, RS reduce-scatter, AG all-gather. First start: share of the backward's FLOPs done before the first "
    "collective. In flight: share of the volume that starts while the backward still computes; late: after it. "
    "Exposed: step - compute. Peak: memory of one device"
)
_SHORT = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "collective-permute": "CP"}
_WIDTH_ELSEWHERE = 160
_ANY_WIDTH = 10_000


def show(inspections: list[Inspection], model: str, folder: Path | None, file: TextIO | None = None) -> None:
    """Writes the table and the pictures' folder; ``model`` is a model's name or a dump's file."""
    file = file or sys.stdout
    # Explicit, because a CI job's environment can make rich write control codes to files.
    width = None if file.isatty() else _WIDTH_ELSEWHERE
    console = Console(file=file, force_terminal=file.isatty(), width=width, highlight=False, markup=False)
    first = inspections[0]
    console.print(Text(f"{model} on {first.title}", "bold"), soft_wrap=True)
    console.print(network_in_words(first.target, first.network))
    # Four significant figures for the longest step.
    digits = max(0, 3 - math.floor(math.log10(max(each.simulation.step_s for each in inspections) * 1e3)))
    console.print(_table(inspections, digits, console))
    if bound := first.bound:
        terms = [bound.step_s, bound.compute_s, bound.forward_s, bound.first_gradient_s, bound.all_reduce_s]
        step, compute, forward, gradient, all_reduce = _in_ms(terms, digits)
        levels = ""
        if first.target.num_hosts > 1:
            between = bound.between_hosts_s
            within_ms, between_ms = _in_ms((bound.all_reduce_s - between, between), digits)
            levels = f" ({within_ms} within hosts, calls included, and {between_ms} between them)"
        console.print(
            f"No schedule can beat the bound, {step} ms: the greater of compute {compute} and forward {forward} "
            f"+ first gradient {gradient} + all-reduce of everything {all_reduce}{levels}."
        )
    if first.target.num_hosts > 1:
        sent = {each.strategy: [f"{num_bytes / MIB:.1f}" for num_bytes in each.sent_bytes] for each in inspections}
        sums = ", ".join(f"{name} {within} + {between}" for name, (within, between) in sent.items())
        console.print(f"A rank sends within its host + to other hosts, MiB: {sums}.")
    chip = first.target.chip
    pool = f"; JAX takes {chip.pool_bytes / 1e9:.1f} unless XLA_PYTHON_CLIENT_MEM_FRACTION is set"
    console.print(f"{_LEGEND}, of {chip.memory_bytes / 1e9:.1f}{pool if chip.platform == 'gpu' else ''}.")
    for inspection in inspections:
        for note in inspection.notes:
            console.print(f"{inspection.strategy}: {note}")
    if folder is not None:
        console.print(f"\n{folder}: timeline.png, timeline.svg, trace.json (for ui.perfetto.dev)", soft_wrap=True)


def as_json(inspections: list[Inspection]) -> dict[str, Any]:
    """The first inspection as one object, with the others in its list ``compare``."""
    first, *others = map(_object, inspections)
    return {**first, "compare": others}


def _object(inspection: Inspection) -> dict[str, Any]:
    overlap, simulation = inspection.schedule.overlap(), inspection.simulation
    bound = inspection.bound
    return {
        "strategy": inspection.strategy,
        "target": inspection.target.spec,
        "devices": inspection.target.num_devices,
        "network_gb_per_s": inspection.gb_per_s,
        "network": network_in_words(inspection.target, inspection.network),
        "latency_us": inspection.network.latency_us,
        "product_dtypes": inspection.product_dtypes,
        "planned": [{"kind": kind, "bytes": num_bytes} for kind, num_bytes in inspection.planned],
        "compiled": [{"kind": kind, "bytes": num_bytes} for kind, num_bytes in inspection.compiled],
        "as_planned": inspection.as_planned,
        "sent_bytes_within_host": inspection.sent_bytes[0],
        "sent_bytes_to_other_hosts": inspection.sent_bytes[1],
        "bytes_started_after_backward": overlap.bytes_started_after_backward,
        "bytes_in_flight_during_backward": overlap.bytes_in_flight,
        "first_start_fraction": overlap.first_start_fraction,
        "most_in_flight": inspection.schedule.most_in_flight(),
        "step_ms": simulation.step_s * 1e3,
        "compute_ms": simulation.compute_s * 1e3,
        "comm_ms": simulation.communication_s * 1e3,
        "exposed_ms": simulation.exposed_s * 1e3,
        "lower_bound_ms": None if bound is None else bound.step_s * 1e3,
        "memory": inspection.memory,
        "notes": inspection.notes,
    }


def _table(inspections: list[Inspection], digits: int, console: Console) -> Table:
    """One row per strategy; one column per strategy if that is too wide."""
    cells = [_cells(inspection, digits) for inspection in inspections]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, unit in _COLUMNS:
        table.add_column(f"{name}\n{unit}", justify="left" if name in _LEFT else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    if Measurement.get(console, console.options.update(width=_ANY_WIDTH), table).maximum <= console.width:
        return table
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for strategy, *_ in cells:
        table.add_column(str(strategy), justify="right")
    for (name, unit), *values in list(zip(_COLUMNS, *cells, strict=True))[1:]:
        table.add_row(f"{name} {unit}".strip(), *values)
    return table


def _cells(inspection: Inspection, digits: int) -> list[str | Text]:
    overlap, simulation, bound = inspection.schedule.overlap(), inspection.simulation, inspection.bound
    total = overlap.num_bytes or 1
    as_planned = inspection.as_planned
    checks = {None: Text("-"), True: Text("ok", "green"), False: Text("NOT AS PLANNED", "bold red")}
    times = (simulation.compute_s, simulation.communication_s, simulation.exposed_s, simulation.step_s)
    return [
        inspection.strategy,
        "-" if as_planned is None else _count(inspection.planned),
        _count(inspection.compiled),
        checks[as_planned],
        f"{overlap.num_bytes / MIB:.1f}",
        "-" if overlap.first_start_fraction is None else f"{overlap.first_start_fraction:.0%}",
        *(f"{share / total:.0%}" for share in (overlap.bytes_in_flight, overlap.bytes_started_after_backward)),
        *_in_ms(times, digits),
        "-" if bound is None else f"{simulation.step_s / bound.step_s:.3f}",
        "-" if inspection.memory is None else f"{inspection.memory['peak'] / 1e9:.1f}",
    ]


def _in_ms(seconds: Iterable[float], digits: int) -> list[str]:
    return [f"{each * 1e3:.{digits}f}" for each in seconds]


def _count(collectives: list[tuple[str, int]]) -> str:
    counts = Counter(kind for kind, _ in collectives)
    return " + ".join(f"{count} {_SHORT.get(kind, kind)}" for kind, count in counts.items()) or "none"
