"""How long it takes to compile a step for machines that are not here, by their size and by the number of parameters.

Two curves, each over many programs: one model for more and more H100s, which must cost no more to compile, and more
and more parameters for 8 of them, which must cost no more each. ``points.py`` says what is timed.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np
from rich import box
from rich.table import Table

from jaxddp.target_compile import check_installed
from jaxddp.targets import target

from ..gates import Gate, compare
from ..options import Options
from ..results import commit, describe_machine
from ..run import Run
from .picture import draw_curves
from .points import PARTS, Point, Setup, measure_all

TRACE_AND_COMPILE = ("trace", "plan", "export", "compile")
GROWTH_LIMIT = 1.2  # of tracing and compiling, from the fewest devices to the most
READ_LIMIT_S = 5.0  # to read and simulate the model's step
# 0.15 over a decade is a factor of 1.4, which is what two timings of one program were seen apart on a busy machine.
LINEAR = 1.15


def describe(options: Options) -> tuple[Setup, str]:
    """Describes what is compiled.

    Args:
        options: How often each (3 times).

    Returns:
        The setup, and its description in a line.

    Raises:
        ValueError: If the compiler for GPUs is not installed.
    """
    num_rounds = options.steps or 3
    setup = Setup(num_rounds)
    check_installed(target(f"h100:{setup.devices[0]}"))
    described = (
        f"{setup.model} for {setup.devices[0]} to {setup.devices[-1]} H100s, and {setup.parameters[0]} to"
        f" {setup.parameters[-1]:,} small parameters for 8: {num_rounds} rounds, bucketed; takes many minutes"
    )
    return setup, described


def run(this: Run, setup: Setup) -> bool:
    """Times both curves, prints the table and fills the folder.

    Args:
        this: The folder, console and rows of this run.
        setup: What to compile.

    Returns:
        Whether every program is as planned, growth over devices is within its limit, growth over parameters linear
        and the model's step read in time.
    """
    folder, console = this.folder, this.console
    load_before = os.getloadavg()[0]
    points = measure_all(console, setup)
    load = f"1-minute load on {os.cpu_count()} cores: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    curves = {curve: [point for point in points if point.curve == curve] for curve in ("devices", "parameters")}
    compiled = [point for point in curves["devices"] if point.has("compile")]
    few, many = compiled[0], compiled[-1]
    growth = [
        compare(f"trace and compile, {many.size} / {few.size} devices, {words}",
                many.rounds(*TRACE_AND_COMPILE, clock=clock), few.rounds(*TRACE_AND_COMPILE, clock=clock), GROWTH_LIMIT)
        for clock, words in (("wall_s", "by the clock"), ("cpu_s", "CPU time"))
    ]  # fmt: skip
    exponents = exponents_of(curves["parameters"])
    read_s = max(point.median_s("read", "simulate") for point in compiled)
    holds = (
        all(point.check == "ok" for point in points)
        and all(gate.holds for gate in growth)
        and exponents["trace and compile"].last <= LINEAR
        and read_s < READ_LIMIT_S
    )
    notes = [
        "seconds by the clock, medians over rounds; CPU: of trace, plan, export and compile, all processes together",
        *(f"{gate.name}: {gate.in_words}, limit {gate.limit} ({'ok' if gate.holds else 'MISSED'})" for gate in growth),
        *(f"CPU time of {part} grows with the number of parameters {fit}" for part, fit in exponents.items()),
        f"{setup.model} is read and simulated in {read_s:.2f} s at most, limit {READ_LIMIT_S:.0f} s",
        load,
    ]
    console.print()
    console.print(_table(points))
    for note in notes:
        console.print(f"[dim]{note}[/dim]", soft_wrap=True)
    _write(folder, points, growth, exponents, notes)
    draw_curves(curves, exponents, folder / "curves.png", setup.model)
    console.print(f"\nwritten to {folder}: table.md, metrics.jsonl, curves.png", soft_wrap=True)
    return holds


class Exponent(NamedTuple):
    """How seconds grow with size: ``size ** exponent``.

    Attributes:
        fitted: Over all sizes, by least squares of logarithms.
        last: Between the two largest, where what does not grow counts least.
    """

    fitted: float
    last: float

    def __str__(self) -> str:
        """In words."""
        word = "" if self.last <= LINEAR else ": more than linear"
        return f"as its power {self.fitted:.2f}, {self.last:.2f} at the end{word}"


def fit_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> Exponent:
    """Fits a power law.

    Args:
        sizes: At least two, ascending.
        seconds: Of each, positive.

    Returns:
        Its exponent.

    Example:
        >>> fit_exponent([10, 100, 1000], [0.5, 5, 50])
        Exponent(fitted=1.0, last=1.0)
    """
    x, y = np.log(sizes), np.log(seconds)
    fitted, last = np.polyfit(x, y, 1)[0], (y[-1] - y[-2]) / (x[-1] - x[-2])
    return Exponent(round(float(fitted), 3), round(float(last), 3))


def exponents_of(points: Sequence[Point]) -> dict[str, Exponent]:
    """Fits every part of a curve, and tracing and compiling together, in CPU time."""
    groups: dict[str, tuple[str, ...]] = {part: (part,) for part in PARTS if part != "start"}
    groups["trace and compile"] = TRACE_AND_COMPILE
    # A child's CPU time comes in ticks: what came to none counts as one.
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    exponents = {}
    for name, parts in groups.items():
        timed = [point for point in points if point.has(*parts)]
        seconds = [point.median_s(*parts, clock="cpu_s") or tick_s for point in timed]
        exponents[name] = fit_exponent([point.size for point in timed], seconds)
    return exponents


_COLUMNS = ("curve", "size", *PARTS, "trace and compile", "CPU", "collectives", "check")


def _cells(point: Point) -> list[str]:
    def seconds(*parts: str, clock: str = "wall_s") -> str:
        return f"{point.median_s(*parts, clock=clock):.3g}" if point.has(*parts) else "-"

    together = [seconds(*TRACE_AND_COMPILE, clock=clock) for clock in ("wall_s", "cpu_s")]
    return [point.curve, f"{point.size:,}", *map(seconds, PARTS), *together, str(point.planned), point.check]


def _table(points: Sequence[Point]) -> Table:
    table = Table(title="seconds to compile", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("curve", "check") else "right", no_wrap=True)
    for previous, point in zip([None, *points], points, strict=False):
        if previous is not None and previous.curve != point.curve:
            table.add_section()
        table.add_row(*_cells(point), style=None if point.check == "ok" else "bold red")
    return table


def _write(
    folder: Path, points: Sequence[Point], growth: Sequence[Gate], exponents: dict[str, Exponent], notes: Sequence[str]
) -> None:
    record = {"benchmark": "compile", "commit": commit(), **describe_machine()}
    record["versions"] = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "python": platform.python_version()}
    record["command"] = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    rows: list[dict[str, Any]] = [asdict(point) for point in points]
    rows += [asdict(gate) | {"check": "ok" if gate.holds else "MISSED"} for gate in growth]
    rows += [{"part": part} | fit._asdict() for part, fit in exponents.items()]
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.writelines(json.dumps(record | row) + "\n" for row in rows)
    body = ["| " + " | ".join(cells) + " |" for cells in (_COLUMNS, ["---"] * len(_COLUMNS), *map(_cells, points))]
    (folder / "table.md").write_text("\n".join([*body, "", *(f"- {note}" for note in notes), ""]))
