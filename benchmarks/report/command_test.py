"""``python -m benchmarks report``: pages where they are asked for, bad input in one line."""

import pytest

from benchmarks.__main__ import main
from benchmarks.report.conftest import gates, steps, write_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs, named as seen from the working folder."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one", main=steps())
    write_run(tmp_path / "two", main=steps(), gates=gates())
    return "one", "two"


def test_the_page_of_one_run_lies_in_its_folder_and_is_made_again(runs, tmp_path, capsys):
    for _ in range(2):
        assert main(["report", "one"]) == 0
        assert capsys.readouterr().out == "written to one/report.html\n"
    assert "The main job" in (tmp_path / "one" / "report.html").read_text()


def test_a_link_in_a_run_is_not_written_through(runs, tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (tmp_path / "one" / "report.html").symlink_to(mine)
    assert main(["report", "one"]) == 2
    assert "must not be a link" in capsys.readouterr().err
    assert mine.read_text() == "mine"


def test_broken_lines_are_named(runs, tmp_path, capsys):
    metrics = next((tmp_path / "one").rglob("metrics.jsonl"))
    metrics.write_text(metrics.read_text() + "{broken\n")
    assert main(["report", "one"]) == 0
    said = capsys.readouterr()
    assert said.out == "written to one/report.html\n"
    number = len(metrics.read_text().splitlines())
    assert said.err == f"one: {metrics.relative_to(tmp_path / 'one')}, line {number}: no JSON object, skipped\n"


def test_several_runs_get_a_folder_of_their_own(runs, tmp_path, capsys):
    assert main(["report", *runs]) == 0
    (page,) = tmp_path.glob("runs/*-report/report.html")
    assert "two compared with one" in page.read_text()
    assert main(["report", *runs, "--out", "there"]) == 0
    assert (tmp_path / "there" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "run (=nowhere) must be the folder of a run"),
        (["one", "one/metrics"], "run (=one/metrics) must be the folder of a run"),
        (["one", "one"], "run (=one) must be named once"),
        (["one/main", "empty"], "run (=empty) must hold results"),
        (["one", "--out", "two"], "out (=two) must not exist, or be an empty folder"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_bad_input(arguments, message, runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    try:
        status = main(["report", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    errors = capsys.readouterr().err
    assert status == 2
    assert message in errors
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert not list(tmp_path.glob("runs/*")) and not list(tmp_path.glob("**/report.html"))
