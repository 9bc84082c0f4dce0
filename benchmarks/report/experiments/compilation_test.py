"""Compilation: curves, growth and exponents."""

from benchmarks.report.conftest import compilation, row
from benchmarks.report.experiments.compilation import middle, section
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
    assert middle(one, "read", 0) == 2.0 and middle(one, "read", 1) == 20.0
    assert middle(one, "plan", 0) is None


def test_growth_is_a_gate():
    growth = row("compile", name="512 / 8 devices", ratio=1.3, low=1.25, high=1.4, limit=1.2) | {"check": "MISSED"}
    made = section([*compilation(), growth])
    assert "0 of 1 gate hold." in made.sentences
    assert [getattr(part, "caption", "") for part in made.parts].count("Ratios and their limits") == 1
