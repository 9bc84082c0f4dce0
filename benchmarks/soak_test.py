"""A short soak: faults are survived, the weights are those of an undisturbed run, and nothing is left behind.

Its ``train`` and ``weights`` are those of a side that needs no framework.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.benchmark import Case
from benchmarks.soak import (
    FULL_DISK,
    KILL,
    LAUNCHER,
    PARTS,
    PREEMPT,
    STOP,
    Fault,
    Goodput,
    Job,
    SoakSetup,
    measure,
    sum_up,
    until,
)
from benchmarks.soak_guard import MARK, marked_processes


def weights(folder):
    saved = np.load(Path(folder, "weights.npz"))
    return int(saved["step"]), {"w": saved["w"]}


def train(program, tell):
    step, w, path = 0, np.zeros(4), Path(program.checkpoint, "weights.npz")
    if path.exists():
        step, saved = weights(program.checkpoint)
        w = saved["w"]
    while step < program.steps:
        step, w = step + 1, w / 3 + step
        if os.environ["RANK"] == "0" and (step % 4 == 0 or step == program.steps):
            np.savez(path.with_name("partial.npz"), step=step, w=w)
            path.with_name("partial.npz").replace(path)
        tell.step(step, 0.0)
    return 0


def soak(folder, side, *kinds, step_s=0.05, quiet_steps=10):
    setup = SoakSetup(side, 30.0, 2, 0, tuple(Fault(kind, 1, 6) for kind in kinds), step_s, quiet_steps)
    rows = list(measure(Case(side, setup, folder), print))
    return [row for row in rows if "fault" in row], next(row for row in rows if "goodput" in row)


@pytest.mark.full
def test_a_kill_and_a_restart(tmp_path):
    (fault,), whole = soak(tmp_path, __file__, KILL)
    assert (fault["fault"], fault["rank"], fault["left_behind"], fault["check"]) == (KILL, 1, "nothing", "ok")
    assert 0 < fault["noticed_s"] < fault["back_s"] and 0 < fault["ended_s"] < fault["back_s"]
    assert fault["steps_lost"] >= 0
    assert whole["check"] == "ok" and whole["max_weight_difference"] == 0 and whole["step"] > fault["step"]
    assert all(whole["parts_s"][part] > 0 for part in ("start", "useful steps", "restart"))
    assert sum(whole["parts_s"].values()) == pytest.approx(60 * whole["minutes"])


@pytest.mark.full
@pytest.mark.parametrize("side", ["jaxddp", "torchref", "torchrun alone"])
def test_every_fault(tmp_path, side):
    kinds = [KILL, FULL_DISK, PREEMPT, LAUNCHER, *([] if side == "torchrun alone" else [STOP])]
    faults, whole = soak(tmp_path, side, *kinds, quiet_steps=60)
    assert [row["fault"] for row in faults] == kinds
    assert whole["check"] == "ok" and not any(row["check"].startswith("WRONG") for row in faults), (faults, whole)


HOLDS = """
import os, signal, subprocess, sys, time
from benchmarks.soak import guarded
from benchmarks.soak_guard import MARK
with guarded() as (folder, mark, _):
    for _ in range(2):
        sleeper = subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: mark}, start_new_session=True)
    os.kill(sleeper.pid, signal.SIGSTOP)
    print(mark, folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_soak(number):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as parent:  # fmt: skip
        try:
            mark, folder = parent.stdout.readline().split()
            assert until(lambda: len(marked_processes(mark)) == 2, 20)  # one has no environment while it is started
            parent.send_signal(number)
            parent.wait(20)
        finally:
            parent.kill()
    assert until(lambda: not marked_processes(mark) and not Path(folder).exists(), 20)
    assert folder not in Path("/proc/mounts").read_text()
    assert MARK not in os.environ


EVENTS = [
    {"at_s": 100.0, "kind": "launched"},
    {"at_s": 102.0, "kind": "started"},
    {"at_s": 107.0, "kind": "compiled", "seconds": 4.0},
    {"at_s": 108.0, "kind": "step", "step": 1, "save_s": 0.25},
    {"at_s": 109.0, "kind": "step", "step": 2, "save_s": 0.0},
    {"at_s": 112.0, "kind": "noticed"},
    {"at_s": 113.0, "kind": "ended"},
    {"at_s": 115.0, "kind": "started"},
    {"at_s": 116.0, "kind": "step", "step": 2, "save_s": 0.0},
    {"at_s": 117.0, "kind": "step", "step": 3, "save_s": 0.0},
    {"at_s": 118.0, "kind": "over"},
]


def test_every_moment_belongs_to_one_part():
    goodput = Goodput()
    for event in EVENTS:
        goodput.add(event)
    assert sum(goodput.parts.values()) == 18.0
    assert goodput.parts == dict(zip(PARTS, (2.75, 1.0, 0.25, 3.0, 4.0, 3.0, 4.0), strict=True))


def life(role, pid, slope, seconds=600):
    return {(role, pid): [(float(at), 500 + slope * at, 20.0, 10.0) for at in range(0, seconds, 2)]}


def test_growth_is_judged_over_the_longest_life_of_a_role():
    job = Job.__new__(Job)
    job._lives = (
        life("rank 0", 1, 1.0, 100) | life("rank 0", 2, 0.0) | life("launcher", 3, 0.1) | life("agent", 4, 0, 60)
    )
    checks = {row["role"]: row["check"] for row in job.longest_lives()}
    assert checks == {"rank 0": "flat", "launcher": "WRONG: memory_mib grow", "agent": "too short to judge"}


def test_faults_of_a_kind_are_one_row():
    row = {"fault": KILL, "framework": "jaxddp", "noticed_s": 1.0, "ended_s": 2.0, "back_s": 9.0, "steps_lost": 4}
    rows = [row | {"left_behind": "nothing", "check": "ok"}]
    rows += [row | {"noticed_s": None, "back_s": 11.0, "left_behind": "port 5", "check": "WRONG: left behind port 5"}]
    (found,) = sum_up(rows)
    assert (found["tried"], found["noticed"], found["noticed_s"], found["back_s"]) == (2, 1, (1.0, 1.0), (10.0, 11.0))
    assert (found["left_behind"], found["check"]) == ("port 5 (1 of 2)", "WRONG: left behind port 5 (1 of 2)")
