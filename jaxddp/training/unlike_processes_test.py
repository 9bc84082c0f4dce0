"""Processes that are given parameters or batches of other shapes: each refuses them in one line."""

import subprocess
import sys
import time

import pytest

from jaxddp.mesh_test import free_port, run_workers

WORKER = """
import sys, time
import jax.numpy as jnp, numpy as np, optax
import jaxddp

address, process_id, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jaxddp.start_process(address, 2, process_id)

def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)

trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh())
params = {"w": np.ones((3, 2 + process_id if kind == "shape" else 2), "f4")}
if kind == "name" and process_id:
    params = {"w": params["w"], "v": params["w"]}
try:
    state = trainer.init(params)
    rows = 4 + 4 * process_id if kind == "rows" else 4
    state, metrics = trainer.step(state, {"x": np.ones((rows, 3), "f4")})
    if kind in ("0", "1"):  # the process whose second batch has other rows
        rows = 7 if process_id == int(kind) else 4
        state, metrics = trainer.step(state, {"x": np.ones((rows, 3), "f4")})
    if kind == "short":
        time.sleep(3 * process_id)
        state, _ = trainer.step(state, {"x": np.ones((2, 3), "f4")})
        trainer.evaluate(state, {"x": np.ones((1, 3), "f4")})
    print("loss", float(metrics["loss"]))
except ValueError as error:
    if kind in ("0", "1"):
        raise
    print(error)
"""


@pytest.mark.parametrize(
    ("kind", "what"), [("shape", "params"), ("name", "params"), ("rows", "batch"), ("none", ""), ("short", "")]
)
def test_they_are_refused(kind, what):
    for output in run_workers(WORKER, 2, kind):
        expected = f"{what} must be alike in all processes" if what else "loss 9.0"
        assert expected in output


@pytest.mark.parametrize("other", [0, 1])
def test_a_batch_that_changes_in_one_process_ends_all_within_seconds(other):
    command, address = [sys.executable, "-c", WORKER], f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen([*command, address, str(one), str(other)], stderr=subprocess.PIPE, text=True)
        for one in range(2)
    ]
    errors, start = [], time.monotonic()
    try:
        errors = [process.communicate(timeout=90)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - start < 60  # most of which starts JAX
    rule = "batch must be alike in all processes, with the same names, dtypes and shapes"
    what = f"in process {other}, batch 2 is x [7, 3] float32"
    assert f"ValueError: {rule}: {what}, and in process {1 - other}, batch 2 is x [4, 3] float32" in errors[other]
    assert f"jaxddp: process {1 - other} ended, because {what}, unlike its own" in errors[1 - other]
    assert [process.returncode for process in processes] == [1, 1]
