"""Compilation: curves, growth and exponents."""

from benchmarks.compilation.section import least_most, middle, section
from benchmarks.report.conftest import compilation, row
from benchmarks.report.figure import Figure


def test_sentences():
    said = section(compilation()).sentences
    assert said[0] == "Compiling for 8 devices takes 0.230 s, and for 512 it takes 5.59 s, 24.30 times as long."
    assert said[2] == "Tracing and compiling grow with the number of parameters as its power 0.90, 1.02 at the end."


def test_curves_are_in_cpu_seconds_and_the_table_by_the_clock():
    made = section(compilation())
    figures = [part for part in made.parts if isinstance(part, Figure)]
    assert [figure.title for figure in figures] == [
        "CPU seconds by number of devices", "CPU seconds by number of parameter tensors",
    ]  # fmt: skip
    assert [key.name for key in figures[0].legend] == ["trace", "compile", "read"]
    assert "compile: 7.06 s at 512 devices." in figures[0].description
    table = made.parts[2]
    assert [column.cell(compilation()[0]) for column in table.columns][:3] == ["devices", "8", "0.230"]


def test_a_median_is_over_rounds_of_one_clock():
    one = row("compile", seconds={"read": [[3.0, 30.0], [1.0, 10.0], [2.0, 20.0]]})
    assert middle(one, ("read",), 0) == 2.0 and middle(one, ("read",), 1) == 20.0
    assert middle(one, ("plan",), 0) is None


def test_growth_is_a_gate():
    growth = row("compile", name="512 / 8 devices", ratio=1.3, low=1.25, high=1.4, limit=1.2) | {"check": "MISSED"}
    made = section([*compilation(), growth])
    assert "0 of 1 gate hold." in made.sentences
    assert [getattr(part, "caption", "") for part in made.parts].count("Ratios and their limits") == 1


def test_rounds_have_their_least_and_most():
    one = row("compile", curve="devices", size=8, seconds={"read": [[3.0, 30.0], [1.0, 10.0]], "plan": [[1.0, 1.0]]})
    assert least_most(one, ("read",), 0) == (1.0, 3.0) and least_most(one, ("plan",), 0) is None
    table = next(part for part in section([one]).parts if getattr(part, "caption", "").startswith("The same"))
    assert [column.cell(one) for column in table.columns if column.name in ("size", "read")] == ["8", "1.00–3.00"]


def test_the_time_to_read_has_its_limit_and_is_no_point():
    reading = row("compile", read_s=6.0, limit_s=5.0) | {"check": "MISSED"}
    made = section([*compilation(), reading])
    assert "Reading and simulating a step takes 6.00 s at most, limit 5 s MISSED." in made.sentences
    assert all(reading not in part.rows for part in made.parts if not isinstance(part, Figure))
