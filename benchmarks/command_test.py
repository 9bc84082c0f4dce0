"""The command line: bad input is one line, exit status 2, no traceback."""

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "error: ranks (=0) must be a positive integer"),
        (["--batch-size", "3"], "error: batch_size (=3) must be divisible by the number of ranks (=2)"),
        (["--steps", "-1"], "error: steps (=-1) must be a positive integer"),
        (["gates", "--steps", "9"], "error: steps (=9) must be at least 10 rounds"),
        (["--data", "nowhere"], "nowhere"),
        (["--out", "."], "error: out (=.) must not exist, or be an empty folder"),
        (["races"], "invalid choice: 'races'"),
        (["--steps", "many"], "invalid int value: 'many'"),
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


def test_a_rank_that_fails_is_one_line_and_its_traceback_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.main_job.MODEL", "no such model")
    assert main(["--steps", "1", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: rank 0 of 1 failed: ValueError: unknown model 'no such model'")
    assert error.count("\n") == 1
    assert "Traceback" in (tmp_path / "error.txt").read_text()
