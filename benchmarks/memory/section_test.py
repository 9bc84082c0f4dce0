"""Memory: components that add up, and the report's figures as the run has them."""

import re

from benchmarks.memory.section import section, total
from benchmarks.report.conftest import memory


def test_sentences():
    said = section(memory()).sentences
    assert (
        said[0] == "After init zero3 holds least, 900.00 MiB on each device, 0.50 of what bucketed holds, 1,800.00 MiB."
    )
    assert said[-2].startswith("3 of 9 compiled sums are their formula's to the byte; the farthest, of zero3 after")


def test_bars_are_as_long_as_the_sum_of_their_components():
    figure = section(memory()).parts[0]
    assert figure.title == "Memory of a device by moment: seed_xl on h100:2"
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="(.*?)%"', figure.drawing.body)]
    largest = max(total(one) for one in memory() if total(one))
    expected = sum(total(one) for one in memory() if total(one)) / largest
    assert abs(sum(widths) / 100 - expected) < 0.01 * len(widths)  # each is rounded to 0.01 %


def test_the_reports_figures_and_the_allocator():
    made = section(memory())
    assert [column.cell(made.published.rows[0]) for column in made.published.columns] == [
        "baseline, after init", "654.659", "–", "1,800.00", "ok", "optax makes the moments at once",
    ]  # fmt: skip
    assert "allocator: not run, cpu devices count none" in made.parts[1].note
    read = {
        "strategy": "zero3",
        "allocator": {"device": "H200", "after_init": 2**20, "peak": 2**21, "after_step": 2**20},
    }
    table = section([*memory(), read | {"check": "after init +0.1%"}]).parts[2]
    assert [column.name for column in table.columns[2:]] == [
        "ranks", "in use after init", "peak of the step", "in use after the step", "check",
    ]  # fmt: skip
    assert [column.cell(table.rows[0]) for column in table.columns] == [
        "zero3", "H200", "–", "1.00", "2.00", "1.00", "after init +0.1%",
    ]  # fmt: skip


def test_a_row_that_is_wrong_has_no_bar():
    wrong = memory()[0] | {"check": "WRONG: +4 bytes"}
    assert "✗ WRONG, see the table" in section([wrong]).parts[0].drawing.body
    assert "<rect" not in section([wrong]).parts[0].drawing.body


def test_what_was_not_run_is_said_by_name():
    missing = {"benchmark": "memory", "part": "zero2", "check": "not run: there is no compiler"}
    made = section([*memory(), missing])
    cells = [column.cell(missing) for column in made.parts[1].columns]
    assert (cells[0], cells[-1]) == ("zero2", "not run: there is no compiler")
    assert made.sentences[-1].startswith("Of 10 rows 1 was not run")
