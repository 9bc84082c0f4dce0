"""The lab around a benchmark, which is a small one of this file: it knows nothing of labs."""

import json
import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.harness.options import Options
from benchmarks.harness.ranks import ranks_of_machine
from benchmarks.harness.run import holds, read_rows
from benchmarks.lab.benchmark import lab_for
from benchmarks.lab.network import open_lab
from benchmarks.registry import BENCHMARKS, Benchmark
from benchmarks.report.sections import rows_as_they_are

# Of a link that is measured and has to be found right: what its ends save up for bursts, 70 ms of this rate, makes up
# for a machine that stands still for so long. A faster one was found off where others had much of the processors.
RATE_MBIT = 30


def describe(options):
    ranks = ranks_of_machine(options.ranks or 2, options.on)
    return (ranks, options.steps), f"{ranks.num} ranks, {ranks.kind}"


def run(this, setup):
    ranks, steps = setup
    if steps == 3:
        raise OSError("out of luck")
    for step in range(steps or 1):
        check = "WRONG: so it is" if step == 1 else "ok"
        this.part(f"step {step}", lambda check=check: [{"hosts": len(ranks.hosts), "check": check}])
    return holds(this.rows)


class Small(Benchmark):
    """A benchmark whose functions are those of this file."""

    module = property(lambda self: sys.modules[__name__])

    def section(self, rows):
        return rows_as_they_are("small", rows)


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "counts", Small("", "of this file", 1))
    monkeypatch.setattr("benchmarks.lab.benchmark.NAMES", ("counts",))


@pytest.mark.lab
def test_any_benchmark_runs_on_a_lab_and_knows_nothing_of_it(counts, tmp_path, capsys):
    assert main(["counts", "--on", "lab", "--hosts", "3", "--rate-mbit", str(RATE_MBIT), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "3 ranks, lab\nlink: " in printed and " Mbit/s measured" in printed and f", {RATE_MBIT} asked, " in printed
    (row,), _ = read_rows(tmp_path / "metrics.jsonl")
    assert (row["benchmark"], row["hosts"], row["link_mbit"], row["check"]) == ("counts", 3, RATE_MBIT, "ok")
    (link,), _ = read_rows(tmp_path / "link" / "metrics.jsonl")
    assert (link["asked_mbit"], link["check"]) == (RATE_MBIT, "ok")
    assert 0.9 * RATE_MBIT < link["rate_mbit"] < 1.1 * RATE_MBIT
    with pytest.raises(ValueError, match="none is open"):
        open_lab()

    assert main(["--resume", str(tmp_path)]) == 0  # with a link of its own
    assert [row["part"] for row in read_rows(tmp_path / "link" / "metrics.jsonl")[0]] == ["link 1", "link 2"]


@pytest.mark.lab
def test_the_lab_runs_benchmarks_each_in_a_folder(counts, tmp_path, capsys):
    assert main(["lab", "--rate-mbit", str(RATE_MBIT), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"2 hosts, links of {RATE_MBIT} Mbit/s each way: counts\nlink: ")
    assert "\ncounts: 2 ranks, lab\n" in printed
    (row,), _ = read_rows(tmp_path / "counts" / "metrics.jsonl")
    assert (row["benchmark"], row["part"], row["hosts"], row["link_mbit"]) == ("counts", "step 0", 2, RATE_MBIT)
    assert "| counts | ok |" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "options.json").read_text())["on"] == "lab"


@pytest.mark.lab
def test_a_lab_of_which_nothing_is_said_has_two_hosts_and_links_of_a_gigabit():
    with lab_for("lab", Options()) as options:
        assert options == Options(on="lab", hosts=2, rate_mbit=1000, ranks=2)
        assert (len(open_lab().hosts), open_lab().rate_mbit) == (2, 1000)


@pytest.mark.lab
@pytest.mark.parametrize(
    ("steps", "check"), [(2, "FAILED: not every check holds, see counts/"), (3, "FAILED: out of luck")]
)
def test_one_that_fails_is_a_row_and_looked_into_again(counts, tmp_path, capsys, steps, check):
    for resume in (["lab", "--steps", str(steps), "--out"], ["--resume"]):
        assert main([*resume, str(tmp_path)]) == 1
        assert f"counts: {check}\n" in capsys.readouterr().out
        assert f"| counts | {check} |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lab", Options(on="gpus"), "on (=gpus) must be lab, or left out, where the benchmark is lab"),
        ("main", Options(hosts=4), "hosts (=4) is of a lab alone, and on (=None) is not lab"),
        ("main", Options(on="gpus", rate_mbit=1), "rate_mbit (=1) is of a lab alone, and on (=gpus) is not lab"),
        ("lab", Options(hosts=9), "hosts (=9) must be at least 2 and at most 8"),
        ("main", Options(on="lab", rate_mbit=0), "rate_mbit (=0) must be a positive number of Mbit/s"),
    ],
)
def test_options_that_do_not_fit_are_refused(name, options, message):
    with pytest.raises(ValueError) as caught, lab_for(name, options):
        pass
    assert str(caught.value) == message


def test_without_a_lab_options_stay_as_they_are():
    with lab_for("main", Options(on="processes", steps=3)) as options:
        assert options == Options(on="processes", steps=3)
