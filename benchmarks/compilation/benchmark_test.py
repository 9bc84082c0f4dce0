"""The compile benchmark from end to end, on the tiny model, and its arithmetic on constructed times."""

import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from benchmarks.compilation import benchmark
from benchmarks.compilation import points as measurements
from benchmarks.compilation.benchmark import GROUPS, exponent_of, fit_exponent, run
from benchmarks.compilation.points import CompilationSetup, Point, polynomials
from benchmarks.compilation.section import CPU, PARTS, WALL, middle, seconds
from benchmarks.harness.run import Run
from jaxddp.instruments.targets import TargetError


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two rounds of two sizes of each curve; its rows, its folder, what it printed and what it returned."""
    folder, output = tmp_path_factory.mktemp("run"), io.StringIO()
    setup = CompilationSetup(2, "tiny", devices=(8, 16), parameters=(10, 30))
    holds = run(Run(folder, Console(file=output, width=200, highlight=False), "compile"), setup)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, folder, output.getvalue(), holds


@pytest.mark.full
def test_every_size_is_compiled_as_planned(finished):
    rows, _, output, _ = finished
    points = [row for row in rows if "curve" in row]
    assert [(row["curve"], row["size"], row["target"]) for row in points] == [
        ("devices", 8, "h100:8"), ("devices", 16, "h100:2x8"), ("parameters", 10, "h100:8"),
        ("parameters", 30, "h100:8"),
    ]  # fmt: skip
    assert [row["check"] for row in points] == ["ok"] * 4, output
    assert [row["planned"] for row in points] == [1, 1, 1, 3]
    for row in points:
        assert set(row["seconds"]) == set(PARTS)
        # Not of what is a difference, which noise on a busy machine can bring to 0.
        assert all(row["seconds"][part][0][0] > 0 for part in ("plan", "export", "start", "read", "simulate"))


@pytest.mark.full
def test_growth_and_exponents_are_recorded(finished):
    rows, _, output, holds = finished
    growth = [row for row in rows if "ratio" in row]
    assert [row["name"] for row in growth] == [
        "trace and compile, 16 / 8 devices, by the clock", "trace and compile, 16 / 8 devices, CPU time",
    ]  # fmt: skip
    exponents = {row["part"]: row for row in rows if "fitted" in row}
    assert set(exponents) == {*PARTS, "trace and compile"} - {"start"}
    assert {row["check"] for part, row in exponents.items() if part != "trace and compile"} == {"no limit"}
    assert exponents["trace and compile"]["check"] in ("ok", "MISSED")
    read_in_time = all(row["check"] == "ok" for row in rows if "read_s" in row)
    linear = exponents["trace and compile"]["last"] <= 1.15
    assert holds == (all(row["check"] != "MISSED" for row in growth) and linear and read_in_time)


@pytest.mark.full
def test_the_table_is_written(finished):
    _, folder, output, _ = finished
    table = (folder / "table.md").read_text()
    medians, spreads, *_ = table.split("\n\n")
    assert medians.startswith("| curve | size | trace | plan | export | start | compile | read | simulate |")
    assert medians.splitlines()[2].startswith("|  |  | s | s | s | s | s | s | s | s | s |")
    assert spreads.startswith("| curve | size | rounds | trace |")
    export = spreads.splitlines()[3].split(" | ")[5]
    least, most = map(float, re.fullmatch(r"([\d.e-]+?\d)-(\d.*)", export).groups())
    assert 0 < least <= most
    assert "Tracing and compiling grow with the number of parameters as its power" in table
    assert "load on" in output


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_an_exponent_is_fitted(power):
    sizes = np.array([10, 100, 1000, 10000])
    fitted = fit_exponent(sizes, 0.01 * sizes**power)
    assert fitted == pytest.approx((power, power), abs=1e-3)  # rounded to three digits


def test_what_does_not_grow_hides_the_exponent_at_the_small_end_alone():
    sizes = np.array([10, 100, 1000, 10000])
    fitted = fit_exponent(sizes, 1.0 + 1e-6 * sizes**2.0)
    assert fitted.fitted < 1
    assert fitted.last == pytest.approx(np.log10(101 / 2), abs=1e-3)  # rounded to three digits
    assert fitted.last > 1.15


def test_parts_are_summed_within_a_round_before_the_median():
    times = {"trace": [1.0, 5.0, 2.0], "plan": [0.0] * 3, "export": [4.0, 1.0, 3.0], "compile": [0.0] * 3}
    row = {"seconds": {part: [(wall, 2 * wall) for wall in walls] for part, walls in times.items()}}
    assert seconds(row, ("trace", "export"), WALL) == [5.0, 6.0, 5.0]
    assert middle(row, ("trace", "export"), WALL) == 5.0
    assert middle(row, ("trace", "export"), CPU) == 10.0


def test_what_no_tick_was_counted_for_can_be_fitted():
    rows = [{"size": size, "seconds": {part: [(0.0, 0.0)] for part in PARTS}} for size in (10, 100)]
    assert {exponent_of(name, rows) for name in GROUPS} == {(0.0, 0.0)}


def test_every_parameter_has_a_gradient_of_its_own():
    keys = jax.random.split(jax.random.key(0), 20)
    params = [0.5 * jax.random.normal(key, (16,)) for key in keys]
    grads = jax.grad(polynomials)(params, jax.random.normal(jax.random.key(1), (8, 16)))
    flat = jnp.stack(grads)
    assert (jnp.abs(flat).max(axis=1) > 0).all()
    assert len(np.unique(np.asarray(flat), axis=0)) == 20


def test_what_cannot_be_compiled_is_a_row_and_no_end(monkeypatch):
    calls = []

    def refuse(*args, **options):
        calls.append(args)
        if len(calls) > 1:  # after the warm-up
            raise TargetError("no program today")

    monkeypatch.setattr(measurements, "compile_for_target", refuse)
    console, setup = (
        Console(file=io.StringIO(), width=200),
        CompilationSetup(2, "tiny", devices=(), parameters=(10, 20)),
    )
    points = measurements.measure_curve(console, setup, "parameters")
    assert [point.check for point in points] == ["WRONG: no program today"] * 2
    assert [set(point.seconds) for point in points] == [{"trace", "plan"}] * 2
    assert [len(point.seconds["trace"]) for point in points] == [1, 1]
    with pytest.raises(ValueError, match="^no program today"):
        measurements.measure_curve(console, setup, "parameters")


@pytest.mark.full
def test_a_run_that_goes_on_measures_nothing_twice(finished, tmp_path, monkeypatch):
    rows, folder, _, holds = finished
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # stopped before the last part
    monkeypatch.setattr(benchmark, "measure_curve", lambda *arguments: pytest.fail("measured twice"))
    console, setup = (
        Console(file=io.StringIO(), width=200),
        CompilationSetup(2, "tiny", devices=(8, 16), parameters=(10, 30)),
    )
    assert run(Run(tmp_path, console, "compile"), setup) == holds
    again = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["part"] for row in again] == [row["part"] for row in rows]
    assert again[-1]["fitted"] == rows[-1]["fitted"]
    assert (tmp_path / "table.md").read_text() == (folder / "table.md").read_text()


@pytest.mark.full
def test_a_curve_that_fails_leaves_the_other_and_is_measured_again(finished, tmp_path, monkeypatch):
    rows = finished[0]

    def of_devices_alone(console, setup, curve):
        if curve == "parameters":
            raise TargetError("no program today")
        return found[curve]

    fields = [field.name for field in dataclasses.fields(Point)]
    found = {
        curve: [Point(*map(row.get, fields)) for row in rows if row.get("curve") == curve]
        for curve in measurements.CURVES
    }
    console, setup = (
        Console(file=io.StringIO(), width=200),
        CompilationSetup(2, "tiny", devices=(8, 16), parameters=(10, 30)),
    )
    monkeypatch.setattr(benchmark, "measure_curve", of_devices_alone)
    assert not run(Run(tmp_path, console, "compile"), setup)
    failed = {row["part"]: row["check"] for row in Run(tmp_path, console, "compile").rows}
    assert (failed["devices"], failed["parameters"]) == ("ok", "FAILED: no program today")
    assert failed["trace and compile"] == "not run: fewer than two sizes were timed"
    monkeypatch.setattr(benchmark, "measure_curve", lambda console, setup, curve: found[curve])
    run(Run(tmp_path, console, "compile"), setup)
    again = Run(tmp_path, console, "compile").rows
    assert sorted(row["part"] for row in again) == sorted(row["part"] for row in rows)
    assert not any(row["check"].startswith(("FAILED", "not run")) for row in again)
