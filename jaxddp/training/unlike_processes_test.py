"""Processes with other parameters, strategies or batches: each refuses them in one line; one that fails ends all."""

import json
import re
import subprocess
import sys
import time

import pytest

from jaxddp.conftest import free_port
from jaxddp.mesh_test import run_workers
from jaxddp.processes.watchdog import STATUS

WORKER = """
import json, sys, tempfile, time
import jax, jax.numpy as jnp, numpy as np, optax
import jaxddp

address, process_id, kinds = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if kinds in ("0", "1"):
    from jaxddp.training import train
    train.BATCH_S = 3.0
jaxddp.start_process(address, 2, process_id)

def run(kind):
    def loss_fn(params, batch):
        is_unlike = kind == "constant" or (kind == "second" and "d" in params)
        last = np.array([1, 2 + process_id if is_unlike else 2], "f4")
        loss = jnp.mean((batch["x"] @ params["w"] + params["b"][0]) ** 2) + jnp.sum(params["c"] * last)
        return jaxddp.Weighted(loss * 4, 4) if process_id and kind == "weighted" else loss

    strategy = jaxddp.bucketed(hook=(jaxddp.hooks.bf16, jaxddp.hooks.fp16)[process_id] if kind == "hook" else None)
    if process_id and kind == "strategy":
        strategy = jaxddp.zero1()
    if process_id and kind == "plan":
        strategy = jaxddp.bucketed(bucket_mb=1e-6)
    rate = 0.2 if process_id and kind == "rate" else 0.1
    optimizer = optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), lambda params: {name: name == "w" for name in params}),
        optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(rate, 0.0, 9), momentum=0.9),
    )
    trainer = jaxddp.Trainer(loss_fn, optimizer, strategy, jaxddp.data_mesh())
    if kind == "none":  # a trainer of this process's own devices takes what rows it likes
        mine = jaxddp.Trainer(loss_fn, optimizer, strategy, jax.sharding.Mesh(np.array(jax.local_devices()), ("data",)))
        mine.step(mine.init({"w": np.ones((3, 2), "f4"), "b": np.zeros(2, "f4"), "c": np.zeros(2, "f4")}),
                  {"x": np.full((4, 3), process_id, "f4")})
    if kind == "across":  # the rank's devices are of both processes
        axes, split = ("data", "model"), jax.sharding.PartitionSpec()
        mesh = jax.sharding.Mesh(np.array([jax.devices()]), axes)
        trainer = jaxddp.Trainer(loss_fn, optimizer, strategy, mesh, axis="data", param_specs=split)
        trainer.step(trainer.init({"w": np.ones((3, 2), "f4"), "b": np.zeros(2, "f4"), "c": np.zeros(2, "f4")}),
                     {"x": np.full((4, 3), process_id, "f4")})
    params = {"w": np.ones((3, 2 + process_id if kind == "shape" else 2), "f4"), "b": np.zeros((2,), "f4")}
    params["c"] = np.zeros((2,), "f4")
    if kind == "name" and process_id:
        params |= {"v": params["w"]}
    state = trainer.init(params)
    if kind == "early" and not process_id:
        raise LookupError("early")
    rows = 4 + 4 * process_id if kind == "rows" else 4
    state, metrics = trainer.step(state, {"x": np.ones((rows, 3 + process_id if kind == "features" else 3), "f4")})
    if kind == "position":
        with tempfile.TemporaryDirectory() as folder:
            jaxddp.Checkpoints(folder).save(trainer, state, data_position=process_id)
    if kind == "measures":
        trainer.evaluate(state, {"x": np.ones((4, 3))}, lambda params, b: {"ab"[process_id]: jaxddp.Sum(b["x"][:, 0])})
    if kind == "second":  # model, of the same trainer and batches
        trainer.step(trainer.init(params | {"d": params["w"]}), {"x": np.ones((rows, 3), "f4")})
    if kind in ("0", "1"):  # the process whose second batch has other rows
        rows = 7 if process_id == int(kind) else 4
        state, metrics = trainer.step(state, {"x": np.ones((rows, 3), "f4")})
    if kind == "short":
        time.sleep(2 * process_id)
        state, _ = trainer.step(state, {"x": np.ones((2, 3), "f4")})
        trainer.evaluate(state, {"x": np.ones((1, 3), "f4")})
    return f"loss {float(metrics['loss'])}"

ends = []
for kind in kinds.split():
    try:
        ends.append(run(kind))
    except ValueError as error:
        if kind in ("0", "1"):
            raise
        ends.append(str(error))
print(json.dumps(ends))
"""


REFUSED = {
    "strategy": "strategy (='zero1' in process 1) must be 'bucketed', as in process 0",
    "name": "parameter 'v' (='[3, 2] float32' in process 1) must be 'absent', as in process 0",
    "shape": "parameter 'w' (='[3, 3] float32' in process 1) must be '[3, 2] float32', as in process 0",
    "rate": r"optimizer (='checksum \w+' in process 1) must be 'checksum \w+', as in process 0",
    "features": "batch (='x [4, 4] float32' in process 1) must be 'x [4, 3] float32', as in process 0",
    "rows": "batch (='x [8, 3] float32' in process 1) must be 'x [4, 3] float32', as in process 0",
    **dict.fromkeys(
        ("constant", "weighted", "second"),
        r"results and constant gradients (='checksum \w+' in process 1) must be 'checksum \w+', as in process 0",
    ),
    "hook": "layout (='<function layout_full> <function fp16>' in process 1) must be .*, as in process 0",
    "measures": "what evaluate measures (=.* in process 1) must be .*, as in process 0",
    "position": "data_position (=1 in process 1) must be 0, as in process 0",
    "across": "batch of process 1 must be the same as of another with ranks [0]",
    "plan": r"plan (='2 buckets, checksum \w+' in process 1) must be '1 buckets, checksum \w+', as in process 0",
}


KINDS = (*REFUSED, "none", "short")


@pytest.fixture(scope="module")
def ends():
    """How each kind ended in either of two processes, which ran them one after the other."""
    return [dict(zip(KINDS, json.loads(line), strict=True)) for line in run_workers(WORKER, 2, " ".join(KINDS))]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_refused(kind, ends):
    expected = REFUSED.get(kind, "loss 9.0").replace("(", r"\(").replace(")", r"\)")
    for of_process in ends:
        assert re.fullmatch(expected.replace("[", r"\[").replace("]", r"\]"), of_process[kind])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["0", "1", "early"])
def test_a_batch_that_changes_in_one_process_or_its_failure_before_a_step_ends_all_within_seconds(kind):
    command, other = [sys.executable, "-c", WORKER, f"127.0.0.1:{free_port()}"], int(kind == "1")
    processes = [subprocess.Popen([*command, str(one), kind], stderr=subprocess.PIPE, text=True) for one in range(2)]
    errors, start = [], time.monotonic()
    try:
        errors = [process.communicate(timeout=90)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - start < 60  # most of which starts JAX
    fault = "step 0: LookupError: early"
    if kind != "early":
        rule = f"must be compared with process {1 - other}, not here within 3 s"
        fault = f"step 1: ValueError: batch (='x [7, 3] float32') {rule}"
    assert fault[8:] in errors[other]
    assert f"jaxddp: process {other} failed, its last {fault}" in errors[1 - other]
    assert processes[1 - other].returncode == STATUS and processes[other].returncode == 1
