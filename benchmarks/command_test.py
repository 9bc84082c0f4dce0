"""The command line: bad input is one line, exit status 2, no traceback and no folder."""

import re

import pytest

from benchmarks.__main__ import main
from benchmarks.registry import BENCHMARKS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 3", "batch_size (=3) must be divisible by the number of ranks (=2)"),
        ("--model gpt", "argument --model: invalid choice: 'gpt' (choose from "),
        ("--dtype tf32", "dtype (=tf32) must be f32 or bf16 on CPUs"),
        ("--strategies naive ddp", "argument --strategies: invalid choice: 'ddp' (choose from "),
        ("--hosts 3", "hosts (=3) is of a lab alone"),
        ("--on lab --hosts 9", "hosts (=9) must be at least 2 and at most 8"),
        ("--on lab --rate-mbit 1e6", "rate_mbit (=1e+06) must be at most 2500"),
        ("--on job", "on (=job) must be in a job"),
        ("--on gpus", "on (=gpus) needs GPUs"),
        ("--out .", "out (=.) must not exist"),
        ("races", "unknown benchmark 'races'"),
        ("gates --steps 9", "steps (=9) must be at least 10 rounds"),
        ("collectives --sizes-mb 0.0001", "must be at least 1 KiB"),
        ("calibrate --strategies jit", "argument --strategies: invalid choice: 'jit' (choose from "),
        ("calibrate --on lab --hosts 9", "hosts (=9) must be at least 2 and at most 8"),
        ("calibrate --target h100:2", "target (=h100:2) must have as many devices as there are ranks (=1)"),
    ],
)
def test_bad_input(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    try:
        status = main(arguments.split())
    except SystemExit as stopped:
        status = stopped.code
    errors = capsys.readouterr().err
    assert (status, errors.count("\n")) == (2, 1) and errors.startswith("error: ") and message in errors
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_lists_the_options_that_a_benchmark_takes(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    listed = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert ended.value.code == 0
    assert listed == {f"--{one.replace('_', '-')}" for one in BENCHMARKS[name].options} | {"--help", "--out"}
