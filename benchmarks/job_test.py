"""Every process of a job is a rank: the same program under each launcher, with the lines of docs/benchmarks.md."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.conftest import read_rows
from jaxddp.conftest import free_port
from parity_tests.job_test import environment, slurm as slurm

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
LAUNCHERS = {"torchrun": (), "mpirun": pytest.mark.mpi, "srun": pytest.mark.slurm}


@pytest.mark.full
@pytest.mark.parametrize("launcher", [pytest.param(name, marks=marks) for name, marks in LAUNCHERS.items()])
def test_a_benchmark_runs_on_the_ranks_of_a_job(launcher, tmp_path, request):
    variables = request.getfixturevalue("slurm") if launcher == "srun" else {}
    if launcher == "mpirun" and not shutil.which("mpirun"):
        pytest.skip("needs Open MPI: apt-get install openmpi-bin")
    (line,) = re.findall(rf"^({launcher} .*) --on job$", PAGE.read_text(), re.M)
    line = line.replace("10.0.0.1:29500", f"127.0.0.1:{free_port()}")
    # Two ranks without GPUs.
    line = line.replace("--nnodes=2 --nproc-per-node=8", "--nnodes=1 --nproc-per-node=2")
    line = line.replace("--ntasks-per-node=8 --gpus-per-task=1", "--ntasks-per-node=1")
    short = ["--on", "job", "--quick", "--model", "tiny", "--steps", "2", "--strategies", "naive", "--out", "run"]
    done = subprocess.run(
        [*line.split(), *short], cwd=tmp_path, env=environment(tmp_path) | variables, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [row for row in read_rows(tmp_path / "run") if row.get("rounds_ms")]
    assert [(row["framework"], row["backend"], row["check"]) for row in steps] == [
        ("jaxddp", "XLA over Gloo", "ok"),
        ("torchref", "Gloo", "ok"),
    ]
    assert {row["job_ranks"] for row in steps} == {2} and done.stdout.count("written to") == 1
