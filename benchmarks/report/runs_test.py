"""Runs are read with their sub-folders; what cannot be read is named."""

import pytest

from benchmarks.report.conftest import row, write_run
from benchmarks.report.runs import Experiment, read_run, read_runs


def test_rows_of_sub_folders_come_together_by_benchmark(tmp_path):
    write_run(tmp_path, main=[row("main", number=1)], races=[row("races"), {"number": 2}])
    (tmp_path / "metrics.jsonl").write_text('{"benchmark": "main", "number": 0}\n')
    run = read_run(tmp_path)
    found = {one.label: [each.get("number") for each in rows] for one, rows in run.experiments.items()}
    assert found == {"main": [0, 1], "races": [None, 2]}
    assert len(run.rows) == 4 and not run.broken


def test_a_lab_within_a_run_is_read_and_kept_apart(tmp_path):
    write_run(tmp_path, buckets=[row("buckets")], lab=[row("lab", link_mbit=1000.0)])
    write_run(tmp_path / "lab", buckets=[row("buckets", link_mbit=1000.0)] * 2, link=[row("lab", link_mbit=1000.0)])
    with (tmp_path / "lab" / "link" / "metrics.jsonl").open("a") as lines:
        lines.write("{half\n")
    run = read_run(tmp_path)
    assert {one: len(rows) for one, rows in run.experiments.items()} == {
        Experiment("buckets"): 1, Experiment("lab", 1000.0): 2, Experiment("buckets", 1000.0): 2,
    }  # fmt: skip
    assert run.broken == (("lab/link/metrics.jsonl", 2),)


def test_runs_beside_each_other_are_not_one(tmp_path):
    write_run(tmp_path / "runs" / "one", main=[row("main")])
    with pytest.raises(ValueError, match="there is no row"):
        read_run(tmp_path / "runs")


def test_broken_lines_are_named(tmp_path):
    write_run(tmp_path, main=[row("main")])
    with (tmp_path / "main" / "metrics.jsonl").open("a") as lines:
        lines.write('{"half": \n[1]\n')
    assert read_run(tmp_path).broken == (("main/metrics.jsonl", 2), ("main/metrics.jsonl", 3))


def test_what_is_no_run_is_an_error_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"run \(=.*nowhere\) must be the folder of a run$"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_text("no row\n")
    with pytest.raises(
        ValueError, match=r"must hold results: there is no row in metrics.jsonl or .*lab/\*/metrics.jsonl$"
    ):
        read_run(tmp_path)


def test_several_runs_are_told_apart(tmp_path):
    paths = [write_run(tmp_path / name / "run", main=[row("main")]) for name in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == ["run (1)", "run (2)"]
    assert [run.name for run in read_runs(paths[:1])] == ["run"]
    with pytest.raises(ValueError, match="must be named once"):
        read_runs([paths[0], paths[0] / "." / ".." / "run"])
