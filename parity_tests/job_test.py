"""What docs/clusters.md says to run, run for real: a script and both ``train`` commands under each launcher.

A script ends with the weights of single-process training, and ``train`` prints its losses.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxddp
import jaxddp.checkpoint.interop
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.cli.train import TrainOptions
from jaxddp.conftest import free_port
from jaxddp.models import build

from . import jax_side, torch_side
from .inputs import largest_difference
from .job_script import CASE

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 180
pytestmark = pytest.mark.full
# The first words of each launcher's block of docs/clusters.md.
LAUNCHERS = {
    "torchrun": "torchrun --standalone",
    "two agents": "torchrun --nnodes=2",
    "SLURM": "#!/bin/bash",
    "Open MPI": "mpirun",
    "SSH": "for rank",
    "launch": "python3 -m jaxddp launch",
}
SAID = {"two agents": "torchrun", "SSH": "torchrun", "launch": "torchrun"}  # what a process finds
ON_TWO_HOSTS = ("two agents", "SLURM", "SSH")
MARKS = {"SLURM": [pytest.mark.slurm], "Open MPI": [pytest.mark.mpi]}


def block(launcher, address="127.0.0.1"):
    page = (ROOT / "docs" / "clusters.md").read_text()
    (found,) = re.findall(rf"^```sh\n({re.escape(LAUNCHERS[launcher])}.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return found.replace("10.0.0.1", address).replace("29500", str(free_port()))


def environment(folder):
    """That of a user who has activated Python's environment; ``ssh`` is a local shell."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "ssh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    (programs / "ssh").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    open_mpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    open_mpi["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    places = {"PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}  # torchrun leaves its folders
    return kept | quiet | open_mpi | places | {"JAX_PLATFORMS": "cpu"}


def run(launcher, commands, folder, variables):
    """Runs a launcher's commands to their end; their output stands in the error if they fail."""
    if launcher == "SLURM":
        (folder / "job.sh").write_text(commands)
        started = [["sbatch", "--wait", "--output=job.out", "job.sh"]]
    else:
        started = [["bash", "-c", commands]] * (2 if launcher == "two agents" else 1)
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    own = environment(folder) | variables
    processes = [subprocess.Popen(command, cwd=folder, env=own, **piped) for command in started]
    try:
        output = "".join(process.communicate(timeout=TIMEOUT_S)[0] for process in processes)
    finally:
        for process in processes:
            process.terminate()  # not killed: launchers end what they have started
    if (folder / "job.out").exists():
        output += (folder / "job.out").read_text()
    assert [process.returncode for process in processes] == [0] * len(processes), output
    return re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|\r", "", output)  # mpirun gives process 0 a terminal


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
    try:
        started = subprocess.run([start, "start", "2", folder], capture_output=True, text=True, timeout=60)
        if started.returncode:
            pytest.skip(f"SLURM does not start here: {started.stderr.strip()}")
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:  # some of it may have started
        subprocess.run([start, "stop", folder], timeout=60, check=True)


@pytest.fixture
def launcher(request):
    if request.param == "SLURM":
        return request.param, request.getfixturevalue("slurm")
    if request.param == "Open MPI" and not shutil.which("mpirun"):
        pytest.skip("needs Open MPI: apt-get install openmpi-bin")
    return request.param, {}


every_launcher = pytest.mark.parametrize(
    "framework, launcher",
    [
        pytest.param(framework, name, marks=MARKS.get(name, []))
        for framework in ("jaxddp", "torchref")
        for name in LAUNCHERS
    ],
    indirect=["launcher"],
)


@every_launcher
def test_a_script_trains_in_its_job(framework, launcher, tmp_path):
    name, variables = launcher
    with jax.enable_x64(True):
        initial = jaxddp.checkpoint.interop.to_numpy(jax_side.initial_params(CASE.model, CASE.dtype))
    np.savez(tmp_path / "initial.npz", **initial)
    arguments = f"import sys; sys.argv[1:] = {framework!r}, {str(tmp_path)!r}\n"
    module = "import runpy; runpy.run_module('parity_tests.job_script', run_name='__main__')\n"
    (tmp_path / "script.py").write_text(arguments + module)
    output = run(name, block(name), tmp_path, variables)
    found = [json.loads((tmp_path / f"process-{index}.json").read_text()) for index in range(2)]
    nccl_on = os.environ.get("NCCL_SOCKET_IFNAME", None if name in ON_TWO_HOSTS else "lo")
    alike = {"processes": 2, "devices": 2, "local_devices": 1, "nccl_on": nccl_on}
    assert found == [{"process": index} | alike for index in range(2)]
    hosts = "2 processes on 2 hosts" if name in ON_TWO_HOSTS else "2 processes on 1 host"
    line = f"{framework}: {SAID.get(name, name)}: {hosts}, 1 x CPU device a process, coordinator "
    assert output.count(line) == 1

    if framework == "jaxddp":
        ((alone, _),) = jax_side.check([CASE._replace(strategy="naive", num_ranks=1)], 1e-12)
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


OPTIONS = {"model": "byte_shallow", "steps": 3, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.1}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Initial weights, and the losses of training from them on one device: of each step, and of the validation."""
    from jaxddp.cli.train_program import train

    path = tmp_path_factory.mktemp("weights") / "weights.npz"
    np.savez(path, **jaxddp.checkpoint.interop.to_numpy(build(OPTIONS["model"], seed=3)[1]))
    reports = train(TrainOptions(**OPTIONS, devices=1, weights=str(path)))
    return path, [report.loss for report in reports] + [reports[-1].validation_loss]


@every_launcher
def test_train_prints_the_losses_of_one_device(framework, launcher, alone, tmp_path):
    name, variables = launcher
    path, losses = alone
    options = [f"--{option.replace('_', '-')}={value}" for option, value in OPTIONS.items()]
    train = " ".join(["-m", framework, "train", *options, f"--strategy=zero1 --weights={path}"])
    start = f"python3 {train} --processes=2" if name == "launch" else block(name).replace("script.py", train)
    output = run(name, start, tmp_path, variables)
    planned = "4 all-reduce" if framework == "jaxddp" else r"2 reduce-scatter \+ 2 all-gather"
    assert len(re.findall(rf"planned {planned}, .* (?:compiled|issued): the same$", output, re.M)) == 1
    found = re.findall(r"^step \d/3  loss ([\d.]+)", output, re.M)
    found += re.findall(r"^step 3/3 .* validation ([\d.]+) nats", output, re.M)
    # Printed to three digits, of float32 sums in another order.
    assert [float(loss) for loss in found] == pytest.approx(losses, abs=6e-4)
    assert losses[0] > 5 and losses[0] - losses[-1] > 0.5


@pytest.mark.parametrize("framework", ["jaxddp", "torchref"])
def test_processes_with_other_options_all_end_with_one_line(framework, tmp_path):
    train = f"-m {framework} train --model=byte_shallow --batch-size=8 --steps=$((rank + 1))"
    commands = block("SSH").replace("script.py", train)
    output = run("SSH", commands, tmp_path, {})
    who = "rank" if framework == "torchref" else "process"
    assert output.count(f"error: steps (=2 in {who} 1) must be 1, as in {who} 0\n") == 2
    assert "Traceback" not in output


@pytest.mark.slurm
@pytest.mark.parametrize("framework", ["jaxddp", "torchref"])
def test_a_job_that_is_requeued_goes_on_from_its_checkpoint(framework, slurm, alone, tmp_path):
    """``scontrol requeue`` sends SIGTERM: the step ends and is saved; the same job, started again, makes the others."""
    from jaxddp.cli.train_program import train

    made = OPTIONS | {"steps": 40}
    options = [f"--{option.replace('_', '-')}={value}" for option, value in made.items()]
    options += [f"--weights={alone[0]}", "--strategy=zero1", "--checkpoint=saved", "--resume"]
    (tmp_path / "job.sh").write_text(block("SLURM").replace("script.py", " ".join([f"-m {framework} train", *options])))
    said = tmp_path / "job.out"

    def ask(*command):
        variables = environment(tmp_path) | slurm
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True).stdout

    def wait_for(what):
        end = time.monotonic() + TIMEOUT_S
        while not what():
            assert time.monotonic() < end, said.read_text()
            time.sleep(0.2)

    job = ask("sbatch", "--parsable", "--requeue", "--open-mode=append", f"--output={said}", "job.sh").strip()
    try:
        wait_for(lambda: said.exists() and re.search(r"^step +1/40 ", said.read_text(), re.M))
        ask("scontrol", "requeue", job)
        wait_for(lambda: "JobState=PENDING" in ask("scontrol", "show", "job", job))
        ask("scontrol", "update", f"jobid={job}", "starttime=now")  # SLURM would wait for two minutes
        wait_for(lambda: "JobState=COMPLETED" in ask("scontrol", "show", "job", job))
    finally:
        ask("scancel", job)
    (step,) = map(int, re.findall(r"^resumed at step (\d+)", said.read_text(), re.M))
    assert 1 <= step < 40, said.read_text()
    *_, loss = map(float, re.findall(r"^step .* validation ([\d.]+) nats", said.read_text(), re.M))
    undisturbed = train(TrainOptions(**made, devices=1, weights=str(alone[0])))
    # Printed to three digits, after 40 steps of float32 sums in another order.
    assert loss == pytest.approx(undisturbed[-1].validation_loss, abs=2e-3)
