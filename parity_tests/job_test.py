"""One script under each launcher, run for real: the weights are those of single-process training."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxddp
import jaxddp.checkpoint.interop
from jaxddp.checkpoint.checkpoints import Checkpoints

from . import jax_side, torch_side
from .inputs import largest_difference
from .job_script import CASE

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 180
PYTHON = sys.executable
LAUNCHERS = {
    "torchrun": [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "Open MPI": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", PYTHON],
    "SLURM": ["srun", "-N2", "-n2", PYTHON],
    "jaxddp": [PYTHON, "-m", "jaxddp", "launch", "--ranks=2"],
}


def environment():
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def run(command, folder, **more):
    """Runs a command to its end; its output stands in the error if it fails."""
    found = subprocess.run(
        command, cwd=folder, env=environment() | more, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A SLURM of two nodes: the one that SLURM_CONF names, or one started on loopback by a program ``slurm-nodes``.

    Gives the environment variables that ``srun`` needs.
    """
    if "SLURM_CONF" in os.environ:
        yield {}
        return
    start = shutil.which("slurm-nodes")
    if start is None or shutil.which("srun") is None:
        pytest.skip("needs SLURM: srun, and SLURM_CONF or a program slurm-nodes that starts nodes on this machine")
    folder = tmp_path_factory.mktemp("slurm")
    started = subprocess.run([start, "start", "2", folder], capture_output=True, text=True, timeout=60)
    if started.returncode:
        pytest.skip(f"SLURM does not start here: {started.stderr.strip()}")
    yield {"SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run([start, "stop", folder], timeout=60, check=True)


@pytest.fixture
def launcher(request):
    """A launcher's command and the variables that it needs."""
    if request.param == "SLURM":
        return request.param, request.getfixturevalue("slurm")
    if request.param == "Open MPI" and not shutil.which("mpirun"):
        pytest.skip("needs Open MPI: apt-get install openmpi-bin")
    return request.param, {}


MARKS = {"SLURM": [pytest.mark.slurm], "Open MPI": [pytest.mark.mpi]}
QUICK = {("jaxddp", "SLURM"), ("jaxddp", "torchrun"), ("torchref", "Open MPI")}


@pytest.mark.parametrize(
    "framework, launcher",
    [
        pytest.param(
            framework, name, marks=MARKS.get(name, []) + ([] if (framework, name) in QUICK else [pytest.mark.full])
        )
        for framework in ("jaxddp", "torchref")
        for name in LAUNCHERS
    ],
    indirect=["launcher"],
)
def test_a_script_trains_in_its_job(framework, launcher, tmp_path):
    name, variables = launcher
    with jax.enable_x64(True):
        initial = jaxddp.checkpoint.interop.to_numpy(jax_side.initial_params(CASE.model, CASE.dtype))
    np.savez(tmp_path / "initial.npz", **initial)
    script = tmp_path / "script.py"
    script.write_text("import runpy; runpy.run_module('parity_tests.job_script', run_name='__main__')")
    output = run([*LAUNCHERS[name], str(script), framework, str(tmp_path)], tmp_path, **variables)
    found = [json.loads((tmp_path / f"process-{index}.json").read_text()) for index in range(2)]
    assert found == [{"process": i, "processes": 2, "devices": 2, "local_devices": 1} for i in range(2)]
    hosts = "2 processes on 2 hosts" if name == "SLURM" else "2 processes on 1 host"
    said = "torchrun" if name == "jaxddp" else name
    assert output.count(f"{framework}: {said}: {hosts}, 1 x CPU device a process, coordinator ") == 1

    if framework == "jaxddp":
        alone = jax_side.train_on_one_device(CASE.model, CASE.optimizer, CASE.dtype, None)
    else:
        alone = torch_side.train_on_one_process(CASE, initial)
    weights = dict(np.load(tmp_path / "weights.npz"))
    assert largest_difference(weights, alone) <= 1e-12  # float64: only the order of sums differs
    if framework == "jaxddp":
        with jax.enable_x64(True):
            params = jax_side.initial_params(CASE.model, CASE.dtype)
            trainer = jax_side.make_trainer(CASE, jaxddp.data_mesh(4))
            with Checkpoints(tmp_path / "checkpoints") as checkpoints:
                state, _ = checkpoints.restore(trainer, params)
            restored = jaxddp.checkpoint.interop.to_numpy(trainer.params(state))
        assert largest_difference(restored, weights) == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=MARKS.get(name, [])) for name in LAUNCHERS], indirect=True
)
def test_train_shows_process_0_and_every_process_has_a_log(launcher, tmp_path):
    name, variables = launcher
    start = [PYTHON] if name == "jaxddp" else LAUNCHERS[name]
    options = ["--strategy=zero1", "--model=byte_shallow", "--steps=2", "--batch-size=8", "--log-dir=logs"]
    more = ["--processes=2"] if name == "jaxddp" else []
    output = run([*start, "-m", "jaxddp", "train", *options, *more], tmp_path, **variables)
    assert output.count("planned 2 all-to-alls, 2 all-gathers") == output.count("compiled: the same") == 1
    logs = [(tmp_path / "logs" / f"rank-{index}.log").read_text() for index in range(2)]
    losses = [
        [line.split()[3] for line in log.splitlines() if line.startswith("step ") and "/" in line] for log in logs
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2
