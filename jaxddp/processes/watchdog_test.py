"""Processes of a job in which one is lost, for real: the others end soon, with one line that names it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxddp.processes.watchdog import STATUS

NUM_PROCESSES, FAULTY, STEP = 3, 1, 3
STUCK_S = 4.0
SAVING_S = 3.0

LOOP = f"""
for step in range(1, 2000):
    if step == {STEP} + 1 and fault in ("all end", "raises at the end") or step == 80:
        break
    if step == {STEP} + 1 and process == faulty and fault == "forks":
        if os.fork() == 0:
            jaxddp.processes.watchdog._watchdog._leave()  # what a child that ends runs of its parent's
            os._exit(0)
        print("faulty at", time.time(), flush=True)
    elif step == {STEP} + 1 and (process == faulty or fault == "all wait") and fault != "raises at the end":
        print("faulty at", time.time(), flush=True)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "sleeps":
            time.sleep(1000)
        if fault == "all wait":
            jaxddp.processes.watchdog.begin_step()
            time.sleep(1000)
        if fault == "raises":
            raise LookupError("out of luck")
        sys.exit(0)
    train()
    time.sleep(0.1)  # so that the others hear of each step
if fault == "raises at the end":
    print("faulty at", time.time(), flush=True)
    if process == faulty:
        raise LookupError("out of luck")
    time.sleep({SAVING_S})
    print("saved", flush=True)
time.sleep(process)
"""

START = """
import os, signal, sys, time
port, process, fault, faulty = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
"""

SCRIPT = f"""{START}
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_num_cpu_devices", 1)
import jaxddp, jaxddp.processes.watchdog
jaxddp.start_process(f"127.0.0.1:{{port}}", {NUM_PROCESSES}, process, stuck_s={STUCK_S})
loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh())
state = trainer.init({{"w": jnp.ones((2, 1))}})

def train():
    global state
    state, _ = trainer.step(state, np.ones((2, 2), np.float32))
{LOOP}"""


EVALUATED = SCRIPT.replace(
    "    global state\n",
    f"""
    global state
    if step > {STEP}:
        trainer.evaluate(state, np.ones((2, 2), np.float32))
        return
""",
)


def run(tmp_path, fault, faulty=FAULTY, program=SCRIPT, num_processes=NUM_PROCESSES):
    """Gives statuses, outputs, and by when after the fault each of the others had ended, in seconds."""
    script = tmp_path / "script.py"
    script.write_text(program)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(port), str(process), fault, str(faulty)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for process in range(num_processes)
    ]  # fmt: skip
    try:
        ends: dict[int, float] = {}
        deadline = time.monotonic() + 100
        others = [process for process in range(num_processes) if fault == "all end" or process != faulty]
        while len(ends) < len(others) and time.monotonic() < deadline:
            ends |= {
                other: time.time() for other in others if other not in ends and processes[other].poll() is not None
            }
            time.sleep(0.05)
        assert len(ends) == len(others), f"processes {set(others) - set(ends)} hang"
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)  # a stopped one as well
    outputs = [process.communicate()[0] for process in processes]
    since = re.search(r"faulty at ([\d.]+)", outputs[faulty])
    seconds = max(ends.values()) - float(since[1]) if since else 0.0
    return [process.returncode for process in processes], outputs, seconds


def check(tmp_path, fault, faulty, reason, within_s, program=SCRIPT):
    statuses, outputs, seconds = run(tmp_path, fault, faulty, program)
    assert seconds < within_s
    for process in range(NUM_PROCESSES):
        if process != faulty:
            assert statuses[process] == STATUS, outputs[process]
            assert f"jaxddp: {reason}: process {process} ends\n" in outputs[process], outputs[process]
            assert "Traceback" not in outputs[process]
    if fault == "sleeps":  # the log of the one that sleeps shows where
        assert re.search(r'File ".*script.py", line \d+ in <module>', outputs[faulty])


@pytest.mark.parametrize(
    ("fault", "faulty", "reason", "within_s"),
    [
        ("killed", 1, "process 1 is gone, its last step 3", 15),
        ("sleeps", 2, f"process 2 did not begin step 4 within {STUCK_S:g} s of the others", STUCK_S + 15),
        pytest.param("all wait", 0, f"no process has finished step 4 within {STUCK_S:g} s", STUCK_S + 15,
                     marks=pytest.mark.full),
        pytest.param("killed", 0, "process 0 is gone, its last step 3", 15, marks=pytest.mark.full),
        pytest.param("stopped", 1, f"process 1 has not answered for {STUCK_S:g} s, its last step 3", STUCK_S + 15,
                     marks=pytest.mark.full),
        pytest.param("stopped", 0, f"process 0 has not answered for {STUCK_S:g} s, its last step 3", STUCK_S + 15,
                     marks=pytest.mark.full),
        pytest.param("sleeps", 0, f"process 0 did not begin step 4 within {STUCK_S:g} s of the others", STUCK_S + 15,
                     marks=pytest.mark.full),
        pytest.param("raises", 1, "process 1 failed, its last step 3: LookupError: out of luck", 15,
                     marks=pytest.mark.full),
        pytest.param("raises", 0, "process 0 failed, its last step 3: LookupError: out of luck", 15,
                     marks=pytest.mark.full),
        pytest.param("exits", 1, "process 1 has ended, its last step 3, and others began step 4", 15,
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_the_others_end_and_name_it(tmp_path, fault, faulty, reason, within_s):
    check(tmp_path, fault, faulty, reason, within_s)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "reason", "stuck_s"),
    [
        ("sleeps", f"process {FAULTY} did not begin call 1 after step 3 within {STUCK_S:g} s of the others", STUCK_S),
        pytest.param("killed", f"process {FAULTY} is gone, its last step 3", 600, marks=pytest.mark.full),
        pytest.param("exits", f"process {FAULTY} has ended, its last step 3, and others began call 1 after step 3", 600,
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_an_evaluation_counts_as_a_step(tmp_path, fault, reason, stuck_s):
    program = EVALUATED.replace(f"stuck_s={STUCK_S}", f"stuck_s={stuck_s}")
    check(tmp_path, fault, FAULTY, reason, STUCK_S + 15, program)


def test_processes_that_end_together_end_well(tmp_path):
    statuses, outputs, _ = run(tmp_path, "all end")
    assert statuses == [0] * NUM_PROCESSES, outputs
    assert not any("jaxddp: process" in output for output in outputs)


@pytest.mark.full
def test_a_process_that_saves_while_another_one_fails_is_let_finish(tmp_path):
    statuses, outputs, _ = run(tmp_path, "raises at the end")
    for process in {*range(NUM_PROCESSES)} - {FAULTY}:
        assert "saved" in outputs[process], outputs[process]
    assert statuses[FAULTY] not in (0, STATUS)


@pytest.mark.full
def test_a_forked_child_that_ends_is_no_process_of_the_job(tmp_path):
    statuses, outputs, _ = run(tmp_path, "forks")
    assert not any("jaxddp: process" in output for output in outputs), outputs
    assert statuses[0] == 0


ENDED_BY_ITS_LAUNCHER = """
import os, signal, sys, threading, time
from jaxddp.processes.job import job_at
from jaxddp.processes.roll_call import meet
from jaxddp.processes.watchdog import watch
process = int(sys.argv[2])
job = job_at(f"127.0.0.1:{sys.argv[1]}", 2, process)
watch(job, meet(job, {}, [], 30), 60)
if process == 1:
    time.sleep(1.5)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
raise ConnectionError("the other has closed the connection")
"""


def test_a_launcher_that_ends_the_others_at_once_does_not_keep_them_from_saying_why(tmp_path):
    statuses, outputs, _ = run(tmp_path, "killed", FAULTY, ENDED_BY_ITS_LAUNCHER, num_processes=2)
    assert statuses == [STATUS, -signal.SIGKILL], outputs
    assert outputs[0] == "jaxddp: process 1 is gone, its last step 0: process 0 ends\n"
