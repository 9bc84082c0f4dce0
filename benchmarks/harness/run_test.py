"""Rows are kept as they are measured; a run that was stopped goes on, and what fails is a row."""

import io
import json

import pytest
from rich.console import Console

from benchmarks.harness.run import FAILED, NotRun, Run, holds, read_rows
from benchmarks.harness.steal_time import Ticks
from torchref.launch import RankError


@pytest.fixture
def console():
    """Prints into a string, ``console.file.getvalue()``."""
    return Console(file=io.StringIO(), width=200, highlight=False)


def measured(number):
    """Gives a part that measures a number."""
    return lambda: [{"number": number, "check": "ok"}]


def raising(error):
    """Gives a part that fails."""

    def measure():
        raise error

    return measure


def numbers(run):
    return [(row["part"], row.get("number"), row["check"]) for row in run.rows]


def test_rows_are_written_part_by_part_and_stand_alone(tmp_path, console):
    run = Run(tmp_path, console, "races")
    run.part("one", measured(1))
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["benchmark"] == "races" and row["command"].startswith("python -m benchmarks")
    assert row.keys() >= {"commit", "machine", "cores", "python", "measured_at"}
    with pytest.raises(KeyboardInterrupt):
        run.part("two", raising(KeyboardInterrupt()))
    assert numbers(Run(tmp_path, console, "races")) == [("one", 1, "ok")]


def test_rows_name_the_gpus_the_driver_and_the_variables(tmp_path, console, monkeypatch):
    found = {"driver": "580.65", "gpus": ["NVIDIA H200"] * 2, "variables": {"NCCL_ALGO": "Ring"}}
    monkeypatch.setattr("benchmarks.harness.run._facts", lambda: found)
    (row,) = Run(tmp_path, console, "strategies").part("a", lambda: [{"check": "ok"}])
    assert found.items() <= row.items()


def test_each_part_says_what_of_the_machine_it_did_not_get(tmp_path, console, monkeypatch):
    counted = iter(
        [Ticks(0, 0), Ticks(50, 100), Ticks(51, 200), Ticks(51, 200), Ticks(60, 220), Ticks(100, 320), Ticks(1, 1)]
    )
    for name in ("benchmarks.harness.run.ticks", "benchmarks.harness.steal_time.ticks"):
        monkeypatch.setattr(name, lambda: next(counted))
    run = Run(tmp_path, console, "races")
    run.part("calm", measured(1))
    run.part("busy", measured(2))
    assert [row["stolen_share"] for row in run.rows] == [0.01, 0.4]
    said = "busy: 40% of the processors' time went to others by this machine's host; its times are longer for it\n"
    assert console.file.getvalue() == said


def test_a_stopped_run_measures_what_is_missing(tmp_path, console):
    Run(tmp_path, console, "races").part("one", measured(1))
    again = Run(tmp_path, console, "races")
    assert again.part("one", raising(AssertionError("measured twice")))[0]["number"] == 1
    again.part("two", measured(2))
    assert numbers(again) == numbers(Run(tmp_path, console, "races")) == [("one", 1, "ok"), ("two", 2, "ok")]
    assert "one: was measured before" in console.file.getvalue()


def test_a_part_is_written_with_all_of_its_rows_or_none(tmp_path, console):
    run = Run(tmp_path, console, "races")
    run.part("one", measured(1))
    with pytest.raises(TypeError, match="not JSON serializable"):  # after the first row was turned into a line
        run.part("two", lambda: [{"number": 2, "check": "ok"}, {"number": object(), "check": "ok"}])
    again = Run(tmp_path, console, "races")
    assert numbers(run) == numbers(again) == [("one", 1, "ok")]
    again.part("two", measured(2))
    assert numbers(again) == [("one", 1, "ok"), ("two", 2, "ok")]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, console, monkeypatch):
    run = Run(tmp_path, console, "races")
    run.part("one", measured(1))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("benchmarks.harness.run.os.fsync", full)
        run.part("two", measured(2))
    assert numbers(run) == numbers(Run(tmp_path, console, "races")) == [("one", 1, "ok")]


def test_an_unfinished_line_costs_no_other(tmp_path, console):
    Run(tmp_path, console, "races").part("one", measured(1))
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"benchmark": "races", "part": "two", "num')
    again = Run(tmp_path, console, "races")
    assert "metrics.jsonl, line 2: no JSON object, skipped" in console.file.getvalue()
    again.part("two", measured(2))
    assert numbers(Run(tmp_path, console, "races")) == [("one", 1, "ok"), ("two", 2, "ok")]
    assert read_rows(tmp_path / "metrics.jsonl")[1] == []


def test_rows_of_a_part_that_grows_keep_when_they_were_measured(tmp_path, console, monkeypatch):
    run = Run(tmp_path, console, "races")
    monkeypatch.setattr("benchmarks.harness.run._envelope", lambda: {"measured_at": "early"})
    run.put("other", measured(0)())
    early = run.put("one", measured(1)())
    monkeypatch.setattr("benchmarks.harness.run._envelope", lambda: {"measured_at": "late"})
    run.put("one", [*early, *measured(2)()])
    rows = Run(tmp_path, console, "races").rows
    found = [(row["part"], row["number"], row["measured_at"]) for row in rows]
    assert found == [("other", 0, "early"), ("one", 1, "early"), ("one", 2, "late")] and rows == run.rows


@pytest.mark.parametrize(
    ("error", "check"),
    [
        (RankError("rank 1 of 2 failed: OSError: no [network]\n\nits traceback"),
         "FAILED: rank 1 of 2 failed: OSError: no [network]"),
        (ValueError("size (=3) is odd"), "FAILED: size (=3) is odd"),
        (OSError(), "FAILED: OSError"),
        (NotRun("there is no GPU"), "not run: there is no GPU"),
    ],
)  # fmt: skip
def test_what_fails_is_a_row_and_the_run_goes_on(error, check, tmp_path, console):
    run = Run(tmp_path, console, "races")
    run.part("first (a)", raising(error))
    run.part("second", measured(2))
    assert numbers(run) == [("first (a)", None, check), ("second", 2, "ok")]
    assert check in console.file.getvalue()
    assert holds(run.rows) is not check.startswith(FAILED)
    if isinstance(error, RankError):
        assert "its traceback" in (tmp_path / "error-first-a-.txt").read_text()


def test_what_failed_is_measured_again(tmp_path, console):
    run = Run(tmp_path, console, "races")
    run.part("one", raising(ValueError("not yet")))
    run.part("two", measured(2))
    again = Run(tmp_path, console, "races")
    again.part("one", measured(1))
    assert numbers(again) == numbers(Run(tmp_path, console, "races")) == [("two", 2, "ok"), ("one", 1, "ok")]


def test_what_is_made_of_other_parts_is_made_anew(tmp_path, console):
    Run(tmp_path, console, "races").part("best", measured(1), is_derived=True)
    again = Run(tmp_path, console, "races")
    again.part("one", measured(2))
    again.part("best", measured(3), is_derived=True)
    assert numbers(again) == numbers(Run(tmp_path, console, "races")) == [("one", 2, "ok"), ("best", 3, "ok")]


def test_an_error_of_our_own_is_no_row(tmp_path, console):
    run = Run(tmp_path, console, "races")
    with pytest.raises(TypeError):
        run.part("one", raising(TypeError()))
    with pytest.raises(AssertionError, match="a row of part 'one' has no check"):
        run.part("one", lambda: [{"number": 1}])
    assert not run.rows


def test_broken_lines_are_skipped_and_named(tmp_path, console):
    (tmp_path / "metrics.jsonl").write_text('{"part": "one", "check": "ok"}\n{"part": \n\n[1]\n')
    assert read_rows(tmp_path / "metrics.jsonl") == ([{"part": "one", "check": "ok"}], [2, 4])
    Run(tmp_path, console, "races")
    printed = console.file.getvalue()
    assert "metrics.jsonl, line 2: no JSON object, skipped" in printed and "line 4: no JSON" in printed
    assert read_rows(tmp_path / "nowhere") == ([], [])


@pytest.mark.parametrize("check", ["FAILED: x", "WRONG: x", "MISSED"])
def test_a_wrong_row_does_not_hold(check):
    assert holds([{"check": "ok"}, {"check": "not run: x"}, {"check": "+3.1%"}])
    assert not holds([{"check": "ok"}, {"check": check}])
