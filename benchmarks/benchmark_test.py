"""The runner and the renderer, on a benchmark that measures nothing."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import benchmark as module
from benchmarks.benchmark import FIELDS, Benchmark, Case, NotRun, run
from benchmarks.conftest import read_rows
from benchmarks.render import CHECK, STEP, Column, new_figure
from jaxddp.cli.doctor import Gpu


def measure(case, say):
    if case.name == "empty":
        return
    yield {"strategy": f"<{case.name}>", "median_ms": 1234.5, "p10_ms": 1.0, "p90_ms": 2.0, "check": case.setup}
    if case.name == "breaks":
        raise OSError("no network\nand its traceback")
    if case.name == "absent":
        raise NotRun("there is no GPU")


def plot(rows):
    rows = [row for row in rows if row["strategy"]]
    figure, axes = new_figure("Steps & more")
    axes[0][0].bar([row["strategy"] for row in rows], [row["median_ms"] for row in rows])
    yield figure


def benchmark(check=lambda rows: ()):
    columns = {"Steps": (Column("strategy"), *STEP, Column("empty"), CHECK), "Others": (Column("name"), CHECK)}
    return Benchmark("toy", "nothing at all", (), lambda options: (), measure, columns, plot, check, ["a note"])


OK, WRONG = Case("good", "ok"), Case("bad", "WRONG: other weights")


def run_in(folder, *cases, **options):
    said = []
    return run(benchmark(**options), cases, folder, said.append, {"link_mbit": 5}), said


def test_rows_are_written_with_all_fields_as_soon_as_they_are_there(tmp_path):
    def check(rows):
        assert len(read_rows(tmp_path)) == len(rows) == 1
        yield {"table": "Others", "name": "compared", "check": "ok"}

    holds, said = run_in(tmp_path, OK, check=check)
    rows = read_rows(tmp_path)
    assert holds and [row["case"] for row in rows] == ["good", "comparison"]
    for row in rows:
        assert set(FIELDS) <= row.keys()
        assert row["commit"] is not None and row["command"].startswith("python -m benchmarks") and row["link_mbit"] == 5


def test_rows_name_the_gpus_and_their_driver(monkeypatch):
    monkeypatch.setattr(module, "gpus", lambda: [Gpu(0, "GPU-0", "H100", "580.65.06", 0, 0)] * 2)
    monkeypatch.setattr(module, "variables", lambda: {})
    row = module.environment.__wrapped__()
    assert (row["driver"], row["gpus"]) == ("580.65.06", ["H100"] * 2) and "variables" not in row


def test_a_case_that_fails_is_a_row_with_its_error(tmp_path):
    holds, said = run_in(tmp_path, Case("breaks", "ok"), Case("empty", "ok"), OK)
    assert not holds
    assert [row["check"] for row in read_rows(tmp_path)] == ["ok", "FAILED: no network", "ok"]
    assert "and its traceback" in read_rows(tmp_path)[1]["error"]
    assert "breaks: FAILED: no network" in said and not any(line.startswith("empty") for line in said)


def test_what_cannot_be_measured_is_no_failure(tmp_path):
    holds, _ = run_in(tmp_path, Case("absent", "ok"))
    assert holds and read_rows(tmp_path)[-1]["check"] == "not run: there is no GPU"


def test_a_process_of_a_job_that_fails_is_ended_by_its_launcher():
    with pytest.raises(OSError, match="no network"):
        run(benchmark(), [Case("breaks", "ok")], None, print, {"job_ranks": 2})


def test_a_wrong_number_is_marked_in_every_view(tmp_path):
    holds, said = run_in(tmp_path, OK, WRONG)
    assert not holds
    table, page = (tmp_path / "table.md").read_text(), (tmp_path / "report.html").read_text()
    assert table in said[-1] or table.split("\n\n", 1)[1].strip() in said[-1]  # the console shows the same
    wrong = [line for line in table.splitlines() if "WRONG" in line]
    assert len(wrong) == 1 and "1,234!" in wrong[0] and "1.00 to 2.00!" in wrong[0]
    assert "1,234 " in table and "empty" not in table and "a note" in table
    bad = re.findall(r'<tr class="bad">.*?</tr>', page)
    assert len(bad) == 1 and "1,234!" in bad[0] and "&lt;bad&gt;" in bad[0]


def test_the_page_is_one_file_that_asks_for_no_other(tmp_path):
    run_in(tmp_path, OK, WRONG)
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!#)|@import|url\((?!#)', page)
    (drawing,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    root = ElementTree.fromstring(drawing)  # inline, and well formed
    assert root.tag.endswith("svg") and 'aria-label="Steps &amp; more"' in page
    assert "other weights" not in drawing
