"""Everything in one run: each benchmark in a folder of its own, the lab where there can be one."""

import contextlib
import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.all import benchmark as all_job
from benchmarks.harness.run import holds, read_rows
from benchmarks.registry import BENCHMARKS, Benchmark
from benchmarks.report.sections import rows_as_they_are


def describe(options):
    return options.steps or 1, f"{options.steps or 1} steps"


def run(this, steps):
    for step in range(steps):
        this.part(f"step {step}", lambda step=step: [{"check": "ok" if step < 2 else "WRONG: too far"}])
    return holds(this.rows)


class Small(Benchmark):
    """A benchmark whose functions are those of this file."""

    module = property(lambda self: sys.modules[__name__])

    def section(self, rows):
        return rows_as_they_are("small", rows)


@pytest.fixture
def small(monkeypatch):
    """Two small benchmarks, one of them not quick, and no lab."""
    for name in ("short", "long"):
        monkeypatch.setitem(BENCHMARKS, name, Small("", "of this file", 7, 2))
    monkeypatch.setattr(all_job, "NAMES", ("short", "long"))
    monkeypatch.setattr(all_job, "NOT_QUICK", ("long",))

    asked = []

    @contextlib.contextmanager
    def no_lab(name, options):
        asked.append(options)
        raise ValueError("a lab needs root")
        yield

    monkeypatch.setattr(all_job, "lab_for", no_lab)
    return asked


def test_each_has_a_folder_and_the_time_is_said_before(small, tmp_path, capsys):
    assert main(["all", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    minutes = 7 + 7 + BENCHMARKS["lab"].full_minutes
    assert printed.startswith(f"short, long, lab: about {minutes} minutes on two cores\n")
    assert "\nshort: 1 steps\n" in printed
    checks = {row["part"]: row["check"] for row in read_rows(tmp_path / "metrics.jsonl")[0]}
    assert checks == {"short": "ok", "long": "ok", "lab": "not run: a lab needs root"}
    assert [row["part"] for row in read_rows(tmp_path / "long" / "metrics.jsonl")[0]] == ["step 0"]
    assert "| lab | not run: a lab needs root |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "report.html").is_file()


def test_the_lab_has_hosts_of_its_own_whatever_ranks_the_others_have(small, tmp_path):
    assert main(["all", "--ranks", "4", "--on", "processes", "--rate-mbit", "200", "--out", str(tmp_path)]) == 0
    (options,) = small
    assert (options.ranks, options.on, options.rate_mbit) == (None, None, 200)


def test_quick_alone_is_all_of_the_short_forms(small, tmp_path, capsys):
    assert main(["--quick", "--steps", "3", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"short, lab: about {2 + BENCHMARKS['lab'].quick_minutes} minutes on two cores\n")
    checks = {row["part"]: row["check"] for row in read_rows(tmp_path / "metrics.jsonl")[0]}
    assert checks["short"] == "FAILED: not every check holds, see short/"
    assert "long" not in checks
