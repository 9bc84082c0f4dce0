"""Processes of a job that are killed or stopped at random moments, as many as the variable JAXDDP_FAULTS says.

All others must leave soon, each with one line that names the process and its last step; a checkpoint that was being
written must not be in the way of the one before.
"""

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import jaxddp
import torchref
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.conftest import free_port
from jaxddp.processes.watchdog import STATUS

NUM_FAULTS = int(os.environ.get("JAXDDP_FAULTS", "2"))
NUM_PROCESSES = 3
STUCK_S = 4.0
LEAVE_S = 15.0
GONE = "is gone"
XLA_ABORTS = "Terminating process because the JAX distributed service detected fatal errors"
XLA_SEES = "coordination_service_agent.cc"  # of the line before that one
SILENT = f"has not answered for {STUCK_S:g} s"
ROOT = Path(__file__).parents[1]
WRITING = "*.partial"  # the name of a checkpoint while it is written
MOMENTS_S = 5.0  # after all have begun the first step: within compilation, or in any step
SIZE, RATE = 2**20, 1 / 64

START = f"""
import sys, time
address, process, folder, host = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
if host:
    from benchmarks.lab import Host
    Host(host, sys.argv[5]).enter()
place = address, {NUM_PROCESSES}, process
def steps():
    print("met", flush=True)
    for number in range(1, 10000):
        print("step", number, flush=True)
        yield number
        time.sleep(0.1)
"""

JAX = f"""{START}
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_num_cpu_devices", 1)
import jaxddp
jaxddp.start_process(*place, stuck_s={STUCK_S})
from jaxddp.checkpoint.checkpoints import Checkpoints
loss_fn = lambda params, batch: jnp.mean(batch) * jnp.sum(params["w"] ** 2) / 2
trainer = jaxddp.Trainer(loss_fn, optax.sgd({RATE}), jaxddp.zero1(), jaxddp.data_mesh())
state = trainer.init({{"w": jnp.ones({SIZE})}})
checkpoints = Checkpoints(folder, keep=3) if folder else None
for _ in steps():
    state, _ = trainer.step(state, np.ones((3, 2), np.float32))
    if folder:
        checkpoints.save(trainer, state)
"""

TORCH = f"""{START}
import torch, torchref
from torchref.launch import init_from_env
init_from_env("gloo", *place, stuck_s={STUCK_S})
from torchref.checkpoint import Checkpoints
vector = torch.nn.Embedding(1, {SIZE} if folder else 100)
vector.weight.data.fill_(1.0)
model = torchref.ZeRO1(vector, torch.optim.SGD, lr={RATE})
trainer = torchref.Trainer(lambda net, batch: net(batch["index"]).square().sum() / 4, model, model)
checkpoints = Checkpoints(folder, keep=3) if folder else None
for step in steps():
    trainer.step({{"index": torch.zeros(2, dtype=torch.int64)}})
    if folder:
        checkpoints.save(trainer, step)
"""


class Job:
    def __init__(self, folder, program, checkpoints=None, hosts=()):
        folder.mkdir()
        (folder / "script.py").write_text(program)
        port = free_port()
        self.logs = [folder / f"{process}.log" for process in range(NUM_PROCESSES)]
        self.processes = []
        for process, path in enumerate(self.logs):
            address = f"{hosts[0].address if hosts else '127.0.0.1'}:{port}"
            command = [sys.executable, folder / "script.py", address, str(process), str(checkpoints or "")]
            command += [hosts[process].name, hosts[process].address] if hosts else [""]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            with path.open("w") as log:
                one = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            self.processes.append(one)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()  # a stopped one as well
            process.wait()

    def said(self, process):
        return self.logs[process].read_text()

    def wait_until_all_met(self):
        """And have begun a step: before it, more patience is shown than ``STUCK_S``."""
        self.wait(lambda: all("step 1" in self.said(each) for each in range(NUM_PROCESSES)), 240, "they do not meet")
        time.sleep(1)  # until this is heard of

    def wait(self, is_so, seconds, what, every_s=0.02):
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: {[self.said(each) for each in range(NUM_PROCESSES)]}"
            time.sleep(every_s)


def lose_one(job, number, faulty):
    """Sends a signal to a process, and gives the seconds until all others have left as they should."""
    since = time.monotonic()
    os.kill(job.processes[faulty].pid, number)
    how = GONE if number == signal.SIGKILL else SILENT
    return check_others(job, faulty, how, since)


def check_others(job, faulty, how, since):
    others = [process for process in range(NUM_PROCESSES) if process != faulty]
    longest_s = LEAVE_S + (how == SILENT) * STUCK_S
    job.wait(lambda: all(job.processes[each].poll() is not None for each in others), longest_s, "others stay")
    seconds = time.monotonic() - since
    steps = re.findall(r"^step (\d+)$", job.said(faulty), re.M)
    for process in others:
        said = job.said(process)
        if faulty == 0 and how == GONE and XLA_ABORTS in said:  # at the same moment, outside of a step
            assert job.processes[process].returncode in (STATUS, -signal.SIGABRT), said
            continue
        assert job.processes[process].returncode == STATUS, said
        up_to_its_end = re.sub(r"(^step \d+\n)+\Z", "", said, flags=re.M)  # one that slept may wake before it has ended
        lines = re.split(r"^step \d+\n|^met\n", up_to_its_end, flags=re.M)[-1].splitlines()
        first, *rest = [line for line in lines if faulty != 0 or XLA_SEES not in line]
        assert not rest or how == SILENT, said  # of a stopped one: the stacks of all threads
        found = re.fullmatch(rf"jaxddp: process {faulty} {how}, its last step (\d+): process {process} ends", first)
        assert found, said
        assert 0 <= len(steps) - int(found[1]) <= 3, said  # as of its last beat, on a busy machine
        assert "Traceback" not in said, said
    return seconds


def count(framework, tmp_path, number, *, saves=False):
    program = {"jaxddp": JAX, "torchref": TORCH}[framework]
    name, times = f"{framework} {number.name}" + saves * " during a save", []
    for trial in range(NUM_FAULTS):
        rng = random.Random(f"{name} {trial}")
        folder = tmp_path / f"{trial}-checkpoints" if saves else None
        with Job(tmp_path / str(trial), program, folder) as job:
            job.wait_until_all_met()
            time.sleep(rng.uniform(0, MOMENTS_S))
            if folder:
                job.wait(
                    lambda folder=folder: any(one.name.isdigit() for one in folder.glob("*")), 120, "nothing is saved"
                )
                job.wait(lambda folder=folder: any(folder.glob(WRITING)), 60, "no save is seen", every_s=0.0005)
            faulty = 0 if folder and rng.random() < 0.7 else rng.randrange(NUM_PROCESSES)
            times.append(lose_one(job, number, faulty))
        if folder:
            (check_newest if framework == "jaxddp" else check_newest_of_torch)(folder)
    report(name, times)


def report(name, times):
    print(f"{name}: {len(times)} of {NUM_FAULTS}, all others had left after {statistics.median(times):.1f} s "
          f"(median), {max(times):.1f} s (longest)")  # fmt: skip


def check_newest(folder):
    trainer = jaxddp.Trainer(lambda p, b: jnp.sum(p["w"]), optax.sgd(RATE), jaxddp.naive(), jaxddp.data_mesh(1))
    with Checkpoints(folder) as checkpoints:
        newest = checkpoints.latest_step()
        state, _ = checkpoints.restore(trainer, {"w": jnp.ones(SIZE)})
    assert int(state.step) == newest
    np.testing.assert_allclose(trainer.params(state)["w"], (1 - RATE) ** newest, rtol=1e-5)


def check_newest_of_torch(folder):
    vector = torch.nn.Embedding(1, SIZE)
    trainer = torchref.Trainer(print, torch.optim.SGD(vector.parameters(), lr=RATE), vector)
    checkpoints = torchref.Checkpoints(folder)
    newest = checkpoints.latest_step()
    assert checkpoints.restore(trainer) == (newest, None)
    np.testing.assert_allclose(vector.weight.detach().numpy(), (1 - RATE) ** newest, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("framework", ["jaxddp", "torchref"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_at_random_moments(tmp_path, framework, number):
    count(framework, tmp_path, number)


@pytest.mark.full
@pytest.mark.parametrize("framework", ["jaxddp", "torchref"])
def test_during_a_save(tmp_path, framework):
    count(framework, tmp_path, signal.SIGKILL, saves=True)


COMES = """
import os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
"""
JOINS = {
    "jaxddp": f"import jaxddp\njaxddp.start_process(stuck_s={STUCK_S})\n",
    "torchref": f"from torchref.launch import init_from_env\ninit_from_env('gloo', stuck_s={STUCK_S})\n",
}
STAYS = """
print("met", flush=True)
import time
time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.parametrize("framework", ["jaxddp", "torchref"])
def test_before_and_after_the_roll_call_ends(tmp_path, framework):
    """Under a launcher: without one, the others wait for a process that may yet come."""
    script, met_first = tmp_path / "script.py", 0
    script.write_text(COMES + JOINS[framework] + STAYS)
    times = []
    for trial in range(NUM_FAULTS):
        rng, folder, faulty = random.Random(f"{framework} {trial}"), tmp_path / str(trial), trial % NUM_PROCESSES
        folder.mkdir()
        options = [f"--ranks={NUM_PROCESSES}", f"--log-dir={folder}/logs"]
        command = [sys.executable, "-m", "jaxddp", "launch", *options, script, folder]
        with (folder / "log").open("w+") as log:
            job = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
            pids = []
            try:
                deadline = time.monotonic() + 60
                while len(pids) < NUM_PROCESSES:
                    assert time.monotonic() < deadline and job.poll() is None, (folder / "log").read_text()
                    pids = [int(pid) for one in folder.glob("[0-9]") if (pid := one.read_text())]
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 6))  # imports take some seconds, then all meet
                met_first += "met" in (folder / "log").read_text()
                since = time.monotonic()
                os.kill(int((folder / str(faulty)).read_text()), signal.SIGKILL)
                assert job.wait(LEAVE_S + STUCK_S) == 128 + signal.SIGKILL, (folder / "log").read_text()
                times.append(time.monotonic() - since)
                assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "a rank outlives its launcher"
            finally:
                job.terminate()
                job.wait(60)
    report(f"{framework}, killed while they meet ({met_first} after the first had met)", times)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1])
@pytest.mark.parametrize("framework", ["jaxddp", "torchref"])
def test_process_0_that_stops_while_it_starts_is_given_up(tmp_path, framework, number):
    script = tmp_path / "script.py"
    script.write_text(COMES + JOINS[framework].replace("stuck_s", "timeout_s=20, stuck_s") + 'print("met")')
    command = [sys.executable, "-m", "jaxddp", "launch", "--ranks=2", "--max-restarts=1", script, tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as job:
        while not (tmp_path / "0").exists() or not (pid := (tmp_path / "0").read_text()):
            assert job.poll() is None
            time.sleep(0.01)
        os.kill(int(pid), number)
        _, said = job.communicate(timeout=200)
    assert job.returncode == 0 and "restart 1 of 1" in said
