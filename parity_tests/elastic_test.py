"""A job that loses a process goes on without it, and ends with the weights of one that lost none."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
NUM_RANKS, NUM_STEPS, LAST_OF_ONE, BATCH = 3, 12, 6, 12

START = f"""
import os, signal, sys
import numpy as np
folder, is_disturbed = sys.argv[1], len(sys.argv) > 2
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rows = slice(rank * {BATCH} // num_ranks, (rank + 1) * {BATCH} // num_ranks)
def batches(first):
    for step in range(first, {NUM_STEPS}):
        if step == {LAST_OF_ONE} and is_disturbed and rank == 1 and num_ranks == {NUM_RANKS}:
            os.kill(os.getpid(), signal.SIGKILL)
        rng = np.random.default_rng(step)
        yield rng.normal(size=({BATCH}, 5))[rows], rng.normal(size=({BATCH}, 3))[rows]
first = np.random.default_rng(99).normal(size=(5, 3))
"""

JAX = f"""{START}
import jax, jax.numpy as jnp, optax
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_enable_x64", True)
import jaxddp
jaxddp.start_process()
from jaxddp.checkpoint import Checkpoints
loss_fn = lambda params, batch: jnp.mean((jnp.tanh(batch[0] @ params["w"]) - batch[1]) ** 2)
trainer = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh())
with Checkpoints(folder) as checkpoints:
    state = trainer.init({{"w": first}})
    if checkpoints.latest_step():
        state, _ = checkpoints.restore(trainer, {{"w": first}})
    for batch in batches(int(state.step)):
        state, _ = trainer.step(state, batch)
        checkpoints.save(trainer, state)
    weights = trainer.params(state)["w"]
if rank == 0:
    np.save(f"{{folder}}/weights.npy", weights)
print("ended in", num_ranks)
"""

TORCH = f"""{START}
import torch, torchref
from torchref.launch import init_from_env
init_from_env("gloo")
from torchref.checkpoint import Checkpoints
linear = torch.nn.Linear(5, 3, bias=False, dtype=torch.float64)
linear.weight.data = torch.tensor(first.T.copy())
model = torchref.ZeRO1(linear, torch.optim.Adam, lr=0.1)
loss_fn = lambda net, batch: (torch.tanh(net(torch.tensor(batch["x"]))) - torch.tensor(batch["y"])).square().mean()
trainer = torchref.Trainer(loss_fn, model, model)
with Checkpoints(folder) as checkpoints:
    step = checkpoints.restore(trainer)[0] if checkpoints.latest_step() else 0
    for x, y in batches(step):
        trainer.step({{"x": x, "y": y}})
        step += 1
        checkpoints.save(trainer, step)
if rank == 0:
    np.save(f"{{folder}}/weights.npy", linear.weight.data.T.numpy())
print("ended in", num_ranks)
"""


@pytest.mark.full
@pytest.mark.parametrize("framework", ["jaxddp", "torchref"])
def test_the_weights_are_those_of_an_undisturbed_run(tmp_path, framework):
    (tmp_path / "script.py").write_text({"jaxddp": JAX, "torchref": TORCH}[framework])
    weights, launch = [], [sys.executable, "-m", "jaxddp", "launch", f"--ranks={NUM_RANKS}", f"--log-dir={tmp_path}"]
    for name, options, disturbed in (("whole", [], []), ("lost", ["--max-restarts=1", "--elastic"], ["disturbed"])):
        (tmp_path / name).mkdir()
        command = [*launch, *options, tmp_path / "script.py", tmp_path / name, *disturbed]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        weights.append(np.load(tmp_path / name / "weights.npy"))
    assert f"ended in {NUM_RANKS - 1}" in done.stdout
    assert f"restart 1 of 1, after status 9, in {NUM_RANKS - 1} processes" in done.stderr
    np.testing.assert_allclose(*weights, rtol=0, atol=1e-12)
    assert np.abs(weights[0] - np.random.default_rng(99).normal(size=(5, 3))).max() > 0.01
