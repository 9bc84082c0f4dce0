"""Several processes over Gloo on loopback: the same trainer, weights from process 0."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.comparison_test import refusal
from jaxddp.conftest import free_port
from jaxddp.mesh import data_mesh, simulate_devices
from jaxddp.processes import start
from jaxddp.processes.start import start_process

WORKER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax, jaxddp
address, process_id, num_processes, num_local = sys.argv[1], *map(int, sys.argv[2:])
jax.config.update("jax_num_cpu_devices", num_local)
jaxddp.start_process(address, num_processes, process_id)

def loss_fn(params, model_state, batch):
    assert jnp.issubdtype(params["frozen"].dtype, jax.dtypes.prng_key)
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2), {"count": model_state["count"] + 1}

rng = np.random.default_rng(0)
x, y = rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)
mine = slice(process_id * 8 // num_processes, (process_id + 1) * 8 // num_processes)
trainer = jaxddp.Trainer(
    loss_fn, optax.sgd(0.1), jaxddp.bucketed(25), jaxddp.data_mesh(), num_microbatches=2, has_state=True,
    trainable=lambda name: name != "frozen",
)
params = {"w": jnp.full((3, 1), float(process_id)), "frozen": jax.random.key(10 + process_id, impl="rbg")}
state = trainer.init(params, model_state={"count": np.float32(process_id)}, seed=process_id)
others = [np.asarray(jax.random.key_data(state.params["frozen"])).tolist(), float(state.model_state["count"])]
for _ in range(3):
    state, metrics = trainer.step(state, {"x": x[mine], "y": y[mine]})
compiled = jaxddp.gradient_collectives(trainer.compile(state, {"x": x, "y": y}))
print(json.dumps({
    "others": others,
    "w": np.asarray(trainer.params(state)["w"]).ravel().tolist(), "loss": float(metrics["loss"]),
    "num_ranks": trainer.num_ranks, "planned": trainer.planned(state, {"x": x, "y": y}), "compiled": compiled,
}))
"""


def run_workers(program, num_processes, *arguments, host="127.0.0.1"):
    """Runs a program, given an address, its number and the arguments, in processes; gives the last line of each."""
    address = f"{host}:{free_port()}"
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, "-c", program, address, str(index), *map(str, arguments)], **piped)
        for index in range(num_processes)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [out.splitlines()[-1] for out, _ in outputs]


@pytest.mark.full
def test_processes_train_as_one_and_start_from_the_weights_of_process_0(monkeypatch):
    for name in ("http_proxy", "https_proxy"):  # as on many clusters; it does not lead to the coordinator
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    alone, *together = (json.loads(line) for num in (1, 2) for line in run_workers(WORKER, num, num, 4 // num))
    for found in together:
        assert found["num_ranks"] == 4 and found["others"] == alone["others"]
        assert found["planned"] == found["compiled"] == [["all-reduce", 12]]
        assert found["w"] == pytest.approx(alone["w"], abs=1e-6)  # float32 sums in another order
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)


LISTENING = """
import ipaddress, os, re, sys
import jax, numpy as np, jaxddp
from jax.experimental import multihost_utils
options = {"preemption_service": True} if sys.argv[3] == "True" else {}
jaxddp.start_process(sys.argv[1], 2, int(sys.argv[2]), **options)
assert multihost_utils.process_allgather(np.ones(3)).sum() == 6
mine = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)}
found = set()
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
        address, state, inode = (line.split()[column] for column in (1, 3, 9))
        if state == "0A" and f"socket:[{inode}]" in mine:
            number = bytes.fromhex(address.split(":")[0])
            in_order = b"".join(number[start : start + 4][::-1] for start in range(0, len(number), 4))
            address = ipaddress.ip_address(in_order)
            found.add(str(getattr(address, "ipv4_mapped", None) or address))
caught = int(re.search(r"SigCgt:\\s*(\\w+)", open("/proc/self/status").read())[1], 16)
print(sorted(found), bool(caught & 1 << 14))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("takes_sigterm", [False, pytest.param(True, marks=pytest.mark.full)])
def test_processes_listen_where_they_reached_each_other_and_end_by_sigterm_unless_jax_is_to_take_it(takes_sigterm):
    """The host's name stands for 127.0.0.1 or 127.0.1.1; to 127.0.0.2 Linux connects from 127.0.0.1."""
    found = run_workers(LISTENING, 2, takes_sigterm, host="127.0.0.2")
    assert found == [f"['127.0.0.2'] {takes_sigterm}", f"['127.0.0.1'] {takes_sigterm}"]


def test_bad_input():
    found = refusal(start_process, "127.0.0.1:1", 2, 2)
    assert "process_id (=2) must be at least 0 and below num_processes (=2)" in found
    assert "num_ranks (=0) must be a positive integer" in refusal(data_mesh, 0)
    assert "num_devices (=True) must be a positive integer" in refusal(simulate_devices, True)


@pytest.mark.parametrize("is_of_job", [False, True])
def test_a_kubernetes_pod_is_left_to_jax_if_it_is_of_a_job(is_of_job, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    if is_of_job:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    seen = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda: seen.append("KUBERNETES_SERVICE_HOST" in os.environ))
    assert start_process() is None
    assert seen == [is_of_job] and os.environ["KUBERNETES_SERVICE_HOST"] == "10.0.0.1"


def test_a_coordinator_that_does_not_answer_is_named():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=f"^coordinator {address} of process 0 must answer within 0.2 s: "):
        start_process(address, 2, 1, timeout_s=0.2)


def test_jax_must_not_have_started_and_a_job_that_nobody_joined_is_told(monkeypatch):
    monkeypatch.setattr(start, "meet", lambda *_: {})
    assert "before anything else uses JAX" in refusal(start_process, f"127.0.0.1:{free_port()}", 2, 0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = jaxddp.Trainer(lambda params, batch: params["w"].sum(), optax.sgd(0.1), jaxddp.flat(), data_mesh(1))
    with pytest.warns(UserWarning, match="trains alone, one of 2 that torchrun has started"):
        trainer.init({"w": np.ones(2, np.float32)})


def test_ranks_of_several_processes_are_all_their_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert data_mesh(jax.device_count()).size == jax.device_count()
    with pytest.raises(ValueError, match=r"^num_ranks \(=3\) must be all devices of the 2 processes \(=8\): a process"):
        data_mesh(3)
