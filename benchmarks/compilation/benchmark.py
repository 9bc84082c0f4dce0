"""Compile time of a step for machines that are not here, by number of devices and of parameters.

One curve compiles a model for more and more H100s, which must not take longer. The other compiles more and more
parameters for 8 H100s, which must not take longer per parameter. ``points.py`` lists what is timed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from jaxddp.instruments.targets import check_installed
from jaxddp.planning.chips import target

from ..harness.options import Options
from ..harness.ratios import compare
from ..harness.run import NotRun, Run
from ..harness.values import Row
from ..report.section import show
from .points import CURVES, CompilationSetup, measure_curve
from .section import CPU, PARTS, TRACE_AND_COMPILE, WALL, middle, seconds, section

GROWTH_LIMIT = 1.2  # of tracing and compiling, most devices over fewest
READ_LIMIT_S = 5.0  # to read and simulate the model's step
# 0.15 over a decade is a factor of 1.4, by which two timings of one program differed on a busy machine.
LINEAR = 1.15
TOGETHER = "trace and compile"
GROWTH, READING = "growth over devices", "reading and simulating"
# Each is a part of the run; the start of JAX does not grow.
GROUPS = {part: (part,) for part in PARTS if part != "start"} | {TOGETHER: TRACE_AND_COMPILE}


def describe(options: Options) -> tuple[CompilationSetup, str]:
    """Describes what is compiled; ``steps`` is the number of rounds (3).

    Raises:
        ValueError: If the compiler for GPUs is not installed.
    """
    num_rounds = options.steps or 3
    setup = CompilationSetup(num_rounds)
    check_installed(target(f"h100:{setup.devices[0]}"))
    described = (
        f"{setup.model} for {setup.devices[0]} to {setup.devices[-1]} H100s, and {setup.parameters[0]} to"
        f" {setup.parameters[-1]:,} small parameters for 8: {num_rounds} rounds, bucketed; takes many minutes"
    )
    return setup, described


def run(this: Run, setup: CompilationSetup) -> bool:
    """Times both curves, prints the table and writes the folder; growth and reading time have limits."""
    for curve in CURVES:
        this.part(curve, partial(curve_rows, this, setup, curve))
    curves = {curve: [row for row in this.rows if row.get("curve") == curve] for curve in CURVES}
    this.part(GROWTH, partial(growth_rows, curves["devices"]), is_derived=True)
    this.part(READING, partial(reading_rows, curves["devices"]), is_derived=True)
    for name in GROUPS:
        this.part(name, partial(exponent_rows, name, curves["parameters"]), is_derived=True)
    return show(this, section(this.rows))


def curve_rows(this: Run, setup: CompilationSetup, curve: str) -> list[dict[str, Any]]:
    """Times a curve: a row per size, with seconds by round and part; raises ValueError if not even one compiles."""
    before = os.getloadavg()[0]
    points = measure_curve(this.console, setup, curve)
    versions = {"jax": version("jax"), "jaxlib": version("jaxlib"), "python": platform.python_version()}
    record = {"versions": versions, "load": [before, os.getloadavg()[0]]}
    return [asdict(point) | record for point in points]


def growth_rows(points: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Compares the most devices with the fewest."""
    compiled = [row for row in points if "compile" in row["seconds"]]
    if len(compiled) < 2:
        raise NotRun("fewer than two sizes were compiled")
    few, many = compiled[0], compiled[-1]
    for clock, words in ((WALL, "by the clock"), (CPU, "CPU time")):
        ours, theirs = (seconds(row, TRACE_AND_COMPILE, clock) for row in (many, few))
        gate = compare(f"{TOGETHER}, {many['size']} / {few['size']} devices, {words}", ours, theirs, GROWTH_LIMIT)
        yield asdict(gate) | {"check": gate.verdict}


def reading_rows(points: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Compares the longest time to read and simulate the model's step with its limit."""
    read = [read_s for row in points if (read_s := middle(row, ("read", "simulate"), WALL)) is not None]
    if not read:
        raise NotRun("no size was compiled")
    yield {"read_s": max(read), "limit_s": READ_LIMIT_S, "check": "ok" if max(read) < READ_LIMIT_S else "MISSED"}


def exponent_rows(name: str, points: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Fits how the CPU time of a part grows with the number of parameters; only tracing and compiling has a limit."""
    if sum(middle(row, GROUPS[name], CPU) is not None for row in points) < 2:
        raise NotRun("fewer than two sizes were timed")
    fit = exponent_of(name, points)
    check = "no limit" if name != TOGETHER else "ok" if fit.last <= LINEAR else "MISSED"
    yield fit._asdict() | {"check": check}


class Exponent(NamedTuple):
    """How seconds grow with size: ``size ** exponent``.

    Attributes:
        fitted: Over all sizes, by least squares of logarithms.
        last: Between the two largest, where constant costs count least.
    """

    fitted: float
    last: float


def fit_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> Exponent:
    """Fits a power law.

    Example:
        >>> fit_exponent([10, 100, 1000], [0.5, 5, 50])
        Exponent(fitted=1.0, last=1.0)
    """
    x, y = np.log(sizes), np.log(seconds)
    fitted, last = np.polyfit(x, y, 1)[0], (y[-1] - y[-2]) / (x[-1] - x[-2])
    return Exponent(round(float(fitted), 3), round(float(last), 3))


def exponent_of(name: str, points: Sequence[Row]) -> Exponent:
    """Fits the CPU time of a group of parts."""
    # A child's CPU time is counted in ticks; less than one counts as one.
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    found = {row["size"]: cpu_s for row in points if (cpu_s := middle(row, GROUPS[name], CPU)) is not None}
    return fit_exponent(list(found), [cpu_s or tick_s for cpu_s in found.values()])
