"""Processes that are given parameters or batches of other shapes: each refuses them in one line."""

import pytest

from jaxddp.mesh_test import run_workers

WORKER = """
import sys
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
    print("loss", float(metrics["loss"]))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(("kind", "what"), [("shape", "params"), ("name", "params"), ("rows", "batch"), ("none", "")])
def test_they_are_refused(kind, what):
    for output in run_workers(WORKER, 2, kind):
        expected = f"{what} must be alike in all processes" if what else "loss 9.0"
        assert expected in output
