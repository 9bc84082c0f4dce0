"""Faults are survived, the weights are those of an undisturbed run, and nothing is left behind."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.benchmark import Case
from benchmarks.soak import KILL, KINDS, SoakSetup, draw_faults, measure, parent_of, sum_up, usage_over
from jaxddp.conftest import wait_for


@pytest.mark.full
@pytest.mark.parametrize("package", ["jaxddp", "torchref"])
def test_every_fault(tmp_path, package):
    setup = SoakSetup(package, 30.0, 2, 0, tuple((kind, 1, 3.0) for kind in KINDS))
    rows = list(measure(Case(package, setup, tmp_path), print))
    *faults, whole = (row for row in rows if row["table"] != "What processes use")
    assert [row["fault"] for row in faults] == [*KINDS]
    assert all(row["check"] == "ok" and row["noticed_s"] <= row["ended_s"] <= row["back_s"] for row in faults), faults
    assert (whole["check"], whole["max_weight_difference"], whole["num_faults"]) == ("ok", 0, 5)
    assert whole["step"] > faults[-1]["step"] and 0 < whole["goodput"] < 1


RUNS = """
import sys, time
from pathlib import Path
from benchmarks.soak import Job, SoakSetup
with Job(SoakSetup("jaxddp", 1.0, 2, 0), Path(sys.argv[1], "ck"), Path(sys.argv[1], "log"), 10**9) as job:
    while len(pids := job.pids()) < 3:
        time.sleep(0.1)
    print(*pids.values(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_nothing_outlives_the_soak(tmp_path, number):
    command, root = [sys.executable, "-c", RUNS, str(tmp_path)], Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(number)
        parent.wait(60)
    wait_for(lambda: {*map(parent_of, pids)} <= {None}, 60)
    assert len(pids) == 3


def test_faults_are_drawn_by_the_seed_every_kind_once_in_a_round():
    first, again, other = (list(itertools.islice(draw_faults(seed, 2), 10)) for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(kind for kind, _, _ in first) == sorted([*KINDS, *KINDS])


def test_growth_is_judged_over_a_quiet_time_that_is_long_enough(monkeypatch):
    used = iter({"memory_mib": memory, "handles": 20, "threads": 5} for memory in (100.0, 106.0))
    monkeypatch.setattr("benchmarks.soak._usage", lambda pid: next(used))
    monkeypatch.setattr("benchmarks.soak.time.sleep", lambda seconds: None)
    (row,) = usage_over({"rank 0": 1}, 200.0)
    assert row["check"] == "WRONG: memory_mib grow" and row["memory_mib_growth"] == 6.0
    monkeypatch.undo()
    assert [row["check"] for row in usage_over({"self": os.getpid()}, 0.1)] == ["too short to judge"]


def test_faults_of_a_kind_are_one_row():
    row = {"fault": KILL, "framework": "jaxddp", "noticed_s": 1.0, "ended_s": 2.0, "back_s": 9.0, "check": "ok"}
    (found,) = sum_up([row, row | {"back_s": 11.0, "check": "WRONG: late"}])
    assert (found["tried"], found["noticed_s"], found["back_s"]) == (2, "1.0 - 1.0", "10.0 - 11.0")
    assert found["check"] == "WRONG: late (1 of 2)"
