"""A short soak: faults are survived, the weights are those of an undisturbed run, and nothing is left behind.

Run as a program, this file is a rank that needs no framework.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.soak.faults import FULL_DISK, KILL, LAUNCHER, PREEMPT, STOP, Fault
from benchmarks.soak.program import Events, parse
from benchmarks.soak.supervised import until
from benchmarks.soak.usage import MARK, marked_processes


def weights(folder):
    saved = np.load(Path(folder, "weights.npz"))
    return int(saved["step"]), {"w": saved["w"]}


def train():
    program = parse()
    events, step, w, path = Events(program), 0, np.zeros(4), Path(program.checkpoint, "weights.npz")
    if path.exists():
        step, saved = weights(program.checkpoint)
        w = saved["w"]
    while step < program.steps:
        step, w = step + 1, w / 3 + step
        if os.environ["RANK"] == "0" and (step % 4 == 0 or step == program.steps):
            np.savez(path.with_name("partial.npz"), step=step, w=w)
            path.with_name("partial.npz").replace(path)
        events.step(step, 0.0)


def soak(folder, side, *kinds, step_s=0.05, quiet_steps=10):
    from benchmarks.harness.run import Run  # not above: torch is slow to import, and the rank needs none
    from benchmarks.soak.benchmark import SoakSetup, run

    faults = tuple(Fault(kind, 1, 6) for kind in kinds)
    this = Run(folder, Console(file=sys.stderr, width=150), "soak")
    is_good = run(this, SoakSetup({side: 30.0}, 2, 0, faults, step_s, quiet_steps))
    whole = next(row for row in this.rows if "goodput" in row)
    return is_good, [row for row in this.rows if "fault" in row], whole


@pytest.mark.full
def test_a_kill_and_a_restart(tmp_path, monkeypatch):
    from benchmarks.soak.benchmark import SIDES

    monkeypatch.setitem(SIDES, "numpy", "soak_test")
    is_good, (fault,), whole = soak(tmp_path, "numpy", KILL)
    assert is_good, (fault, whole)
    assert (fault["fault"], fault["rank"], fault["left_behind"], fault["check"]) == (KILL, 1, "nothing", "ok")
    assert 0 < fault["noticed_s"] < fault["back_s"] and 0 < fault["ended_s"] < fault["back_s"]
    assert fault["steps_lost"] >= 0
    assert whole["max_weight_difference"] == 0 and whole["step"] > fault["step"]
    assert all(whole["parts_s"][part] > 0 for part in ("start", "useful steps", "restart"))
    assert sum(whole["parts_s"].values()) == pytest.approx(60 * whole["minutes"])


@pytest.mark.full
@pytest.mark.parametrize("side", ["jaxddp", "torchref", "torchrun alone"])
def test_every_fault(tmp_path, side):
    kinds = [KILL, FULL_DISK, PREEMPT, LAUNCHER, *([] if side == "torchrun alone" else [STOP])]
    is_good, faults, whole = soak(tmp_path, side, *kinds, quiet_steps=60)
    assert is_good and [row["fault"] for row in faults] == kinds, (faults, whole)
    assert whole["max_weight_difference"] == 0


HOLDS = """
import os, signal, subprocess, sys, time
from benchmarks.soak.guard import guarded
from benchmarks.soak.usage import MARK
with guarded() as workplace:
    for _ in range(2):
        sleeper = subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: workplace.mark}, start_new_session=True)
    os.kill(sleeper.pid, signal.SIGSTOP)
    print(workplace.mark, workplace.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_soak(number):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as parent:  # fmt: skip
        try:
            mark, folder = parent.stdout.readline().split()
            assert until(lambda: len(marked_processes(mark)) == 2, 10)  # one has no environment while it is started
            parent.send_signal(number)
            parent.wait(20)
        finally:
            parent.kill()
    assert until(lambda: not marked_processes(mark) and not Path(folder).exists(), 20)
    assert folder not in Path("/proc/mounts").read_text()
    assert MARK not in os.environ


if __name__ == "__main__":
    train()
