"""The command line: bad input is one line, exit status 2, no traceback."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.registry import BENCHMARKS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "error: ranks (=0) must be a positive integer"),
        (["--batch-size", "3"], "error: batch_size (=3) must be divisible by the number of ranks (=2)"),
        (["--steps", "-1"], "error: steps (=-1) must be a positive integer"),
        (["gates", "--steps", "9"], "error: steps (=9) must be at least 10 rounds"),
        (["--data", "nowhere"], "nowhere"),
        (["--resume", ""], "error: argument --resume: must not be empty"),
        (["report", ""], "error: argument RUN: must not be empty"),
        (["--out", "."], "error: out (=.) must not exist, or be an empty folder"),
        (["races"], "invalid choice: 'races'"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (
            ["collectives", "--model", "tiny"],
            "error: --model changes nothing of collectives, which takes --",
        ),
        (
            ["memory", "--quick", "--ranks", "4"],
            "error: --ranks changes nothing of memory, which takes --quick,",
        ),
        (["gates", "--profile"], "error: --profile changes nothing of gates, which takes "),
        (["gates", "--seed", "1"], "error: --seed changes nothing of gates, which takes "),
        (["soak", "--ranks", "1"], "error: ranks (=1) must be at least 2"),
        (["soak", "--minutes", "0"], "error: minutes (=0) must be positive"),
        (["soak", "--seed", "-1"], "error: seed (=-1) must not be negative"),
        (
            ["--resume", "x", "--steps", "9"],
            "error: resume (=x) goes on as the run was called: nothing else can",
        ),
        (["main", "--resume", "x"], "error: resume (=x) goes on as the run was called: nothing else can"),
    ],
)
def test_bad_input(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    errors = capsys.readouterr().err
    assert status == 2
    assert message in errors
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))


def fail(*args):
    """Runs in a rank."""
    raise ValueError("there is no such rank")


def test_a_framework_that_fails_is_a_row_and_its_traceback_a_file(capsys, tmp_path, monkeypatch):
    for name in ("run", "initial_weights"):
        monkeypatch.setattr(f"benchmarks.training.frameworks.jax_side.{name}", fail)
    assert main(["--steps", "1", "--out", str(tmp_path)]) == 1
    said = "rank 0 of 1 failed: ValueError: there is no such rank"
    printed = capsys.readouterr().out
    for framework in ("jaxddp", "torchref"):
        assert f"{framework}: FAILED: {said}" in printed
        assert "Traceback" in (tmp_path / f"error-{framework}.txt").read_text()
    assert "between frameworks: FAILED: one of the frameworks has no results" in printed
    assert said in (tmp_path / "table.md").read_text()


def test_interrupt_while_modules_are_imported_is_one_line_and_status_130():
    command = [sys.executable, "-m", "benchmarks", "strategies"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():  # torch is being imported
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, output, error) == (130, "", "interrupted\n")


def test_help_of_a_benchmark_lists_what_it_takes(capsys):
    helps = {}
    for arguments in (["--help"], ["collectives", "--help"], ["soak", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        helps[arguments[0]] = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert helps["--help"] > helps["collectives"] | helps["soak"] | {"--bucket-mb"}
    for name in ("collectives", "soak"):
        taken = {f"--{option.replace('_', '-')}" for option in BENCHMARKS[name].takes}
        assert helps[name] == taken | {"--help", "--out", "--resume"}
