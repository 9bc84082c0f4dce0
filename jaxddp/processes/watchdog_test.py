"""Processes of a job in which one is lost or stuck, for real: the others end soon, with one line that names it.

Kills and stops at random moments are in ``parity_tests/faults_test.py``.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxddp.comparison_test import mostly_full
from jaxddp.conftest import free_port
from jaxddp.processes.watchdog import STATUS

NUM_PROCESSES, STEP = 3, 3
STUCK_S = 4.0

JAX = f"""
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_num_cpu_devices", 1)
import jaxddp
jaxddp.start_process(f"127.0.0.1:{{port}}", {NUM_PROCESSES}, process, stuck_s={STUCK_S})
loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh())
state = trainer.init({{"w": jnp.ones((2, 1))}})
def train():
    global state
    if step > {STEP} and fault.startswith("evaluation"):
        trainer.evaluate(state, np.ones((2, 2), np.float32))
        return
    if step > {STEP} and fault.startswith("save"):
        jaxddp.Checkpoints(sys.argv[0] + ".saved").save(trainer, state)
        return
    state, _ = trainer.step(state, np.ones((2, 2), np.float32))
"""
TORCH = f"""
import torch, torchref, torch.distributed
from torchref.launch import init_from_env
init_from_env("gloo", f"127.0.0.1:{{port}}", {NUM_PROCESSES}, process, stuck_s={STUCK_S})
torch.manual_seed(0)
"""
TORCHREF = f"""{TORCH}
model = torchref.WRAPPER(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    optimizer.zero_grad()
    model(torch.ones(2, 2)).square().mean().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
"""
WITHOUT_0 = f"""
train_together, others = train, torch.distributed.new_group([1, 2])
def train():
    if step <= {STEP}:
        train_together()
    elif process == 0:
        sys.exit()
    else:
        torch.distributed.all_reduce(torch.ones(2), group=others)
"""
# In place of JAX's five minutes, for which processes that have ended wait for others.
SHORT_BARRIER = """
from functools import partial
from jax._src import distributed
client = distributed._jax.get_distributed_runtime_client
distributed._jax.get_distributed_runtime_client = partial(client, shutdown_timeout=4)
jax.distributed.initialize = partial(jax.distributed.initialize, shutdown_timeout_seconds=4)
"""
PROGRAMS = {
    "jaxddp": JAX,
    "short barrier": JAX.replace("import jaxddp\n", f"{SHORT_BARRIER}import jaxddp\n"),
    "torchref": TORCHREF.replace("WRAPPER", "BucketedDDP"),
    "FSDP": TORCHREF.replace("WRAPPER", "FSDP"),
    "without 0": TORCHREF.replace("WRAPPER", "BucketedDDP") + WITHOUT_0,
    # Nothing of torchref's, and more patience: who waits in a collective for one that has failed ends before that.
    "torch": f"{TORCH}train = lambda: torch.distributed.all_reduce(torch.ones(2))".replace(f"={STUCK_S}", "=40"),
}
LOOP = f"""
for step in range(1, 2000):
    if step == {STEP} + 1 and fault in ("all end", "works on") or step == 40:
        break
    if step == {STEP} + 1 and process == faulty and fault == "forks":
        if os.fork() == 0:
            atexit._run_exitfuncs()  # what its parent calls when it ends
            os._exit(0)
        print("faulty at", time.time(), flush=True)
    elif step == {STEP} + 1 and (process == faulty or fault == "all wait"):
        print("faulty at", time.time(), flush=True)
        if fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.endswith("sleeps"):
            time.sleep(1000)
        while fault == "spins":
            pass
        if fault == "all wait":
            from jaxddp.processes.watchdog import begin_step
            begin_step()
            time.sleep(1000)
        if fault == "leaves":  # as the commands do after an error
            from jaxddp.processes.watchdog import leave
            leave("error: no luck", 2)
            sys.exit(2)
        if fault == "raises":
            raise LookupError("out of luck")
        if fault == "_exit":
            os._exit(0)
        sys.exit(0)
    train()
    time.sleep(0.1)
time.sleep(10 * (process == faulty) if fault == "works on" else process)
"""
START = """
import atexit, os, signal, sys, time
port, process, fault, faulty = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
"""


def run(tmp_path, program, fault, faulty=1):
    """Gives statuses, outputs, and by when after the fault each of the others had ended, in seconds."""
    script = tmp_path / "script.py"
    script.write_text(START + PROGRAMS[program] + LOOP)
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(port), str(process), fault, str(faulty)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for process in range(NUM_PROCESSES)
    ]  # fmt: skip
    # Who leaves waits for the others, and so ends after them.
    ends = fault in ("all end", "works on", "forks", "leaves", "raises")
    others = [process for process in range(NUM_PROCESSES) if ends or process != faulty]
    try:
        deadline = time.monotonic() + 150
        while any(processes[other].poll() is None for other in others):
            assert time.monotonic() < deadline, "a process hangs"
            time.sleep(0.05)
        ended = time.time()
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)  # a stopped one as well
    outputs = [process.communicate()[0] for process in processes]
    since = re.search(r"faulty at ([\d.]+)", outputs[faulty])
    return [process.returncode for process in processes], outputs, ended - float(since[1]) if since else 0.0


SLEEPS = f"did not begin step 4 within {STUCK_S:g} s of"
SILENT = f"has not answered for {STUCK_S:g} s, its last step 3"
ERROR = "failed, its last step 3: LookupError: out of luck"
QUICK = ("jaxddp", "sleeps", 2, f"process 2 {SLEEPS}")
CASES = [
    QUICK,
    ("torchref", "stopped", 1, f"process 1 {SILENT}"),
    ("FSDP", "spins", 1, rf"process 1 did not begin collective \d+, after step 3, within {STUCK_S:g} s of"),
    ("torch", "sleeps", 2, r"process 2 did not begin collective \d+, after step 0, within 60 s of"),
    ("torchref", "sleeps", 0, f"process 0 {SLEEPS}"),
    ("torchref", "_exit", 1, "process 1 is gone, its last step 3"),
    ("torchref", "raises", 1, f"process 1 {ERROR}"),
    ("jaxddp", "all wait", 0, f"no process has finished step 4 within {STUCK_S:g} s"),
    ("jaxddp", "spins", 0, f"process 0 {SLEEPS}"),
    ("jaxddp", "raises", 1, f"process 1 {ERROR}"),
    ("jaxddp", "raises", 0, f"process 0 {ERROR}"),
    ("jaxddp", "leaves", 0, "process 0 failed, its last step 3: error: no luck"),
    ("torchref", "leaves", 1, "process 1 failed, its last step 3: error: no luck"),
    ("torch", "leaves", 1, "process 1 failed, its last step 0: error: no luck"),
    ("without 0", "stopped", 2, f"process 2 {SILENT}"),
    ("torchref", "exits", 0, "process 0 has ended, its last step 3, and others began step 4"),
    ("jaxddp", "exits", 1, "process 1 has ended, its last step 3, and others began step 4"),
    ("jaxddp", "evaluation sleeps", 1, f"process 1 did not begin call 1 after step 3 within {STUCK_S:g} s of"),
    ("jaxddp", "save sleeps", 1, f"process 1 did not begin call 1 after step 3 within {STUCK_S:g} s of"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "fault", "faulty", "reason"), mostly_full([QUICK], CASES))
def test_the_others_end_and_name_it(tmp_path, program, fault, faulty, reason):
    statuses, outputs, seconds = run(tmp_path, program, fault, faulty)
    assert seconds < (60 if "step 0, within 60 s" in reason else STUCK_S) + 15
    for process in range(NUM_PROCESSES):
        if process != faulty:
            assert statuses[process] == STATUS, outputs[process]
            assert re.search(f"^jaxddp: {reason}.*: process {process} ends$", outputs[process], re.M), outputs[process]
            assert "Traceback" not in outputs[process]
    if fault in ("leaves", "raises"):
        assert statuses[faulty] == (2 if fault == "leaves" else 1), outputs[faulty]
    if fault in ("sleeps", "spins"):  # the log of the one that is stuck shows where
        assert re.search(r'File ".*script.py", line \d+ in <module>', outputs[faulty])


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "fault", "faulty"),
    [
        ("jaxddp", "all end", 1), ("torchref", "all end", 1), ("torchref", "forks", 1),
        ("short barrier", "works on", 0), ("torchref", "works on", 1),
    ],
)  # fmt: skip
def test_processes_end_well_together_or_one_after_the_other_and_a_forked_child_is_none(
    tmp_path, program, fault, faulty
):
    statuses, outputs, _ = run(tmp_path, program, fault, faulty)
    assert statuses == [0] * NUM_PROCESSES, outputs
    assert not any("jaxddp: process" in output for output in outputs)
