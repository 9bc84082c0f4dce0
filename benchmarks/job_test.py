"""Benchmarks on the hosts of a job, to the end, with the lines of docs/benchmarks.md that start one."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.harness.run import read_rows
from parity_tests.job_test import environment
from parity_tests.job_test import slurm as slurm

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
TIMEOUT_S = 900
# The first words of each launcher's line.
LAUNCHERS = {"torchrun": "torchrun", "Open MPI": "mpirun", "SLURM": "srun"}
MARKS = {"SLURM": [pytest.mark.slurm], "Open MPI": [pytest.mark.mpi]}
WHERE = {"torchrun": "2 hosts", "Open MPI": "2 processes on 1 host", "SLURM": "2 hosts"}


@pytest.fixture
def start(tmp_path, request):
    """Starts a benchmark under a launcher, torchrun once for each host; ends what is left of it."""
    started = []

    def start(launcher, *arguments):
        variables = request.getfixturevalue("slurm") if launcher == "SLURM" else {}
        if launcher == "Open MPI" and not shutil.which("mpirun"):
            pytest.skip("needs Open MPI: apt-get install openmpi-bin")
        (line,) = re.findall(rf"^```sh\n({LAUNCHERS[launcher]} .*) strategies --on job\n```$", PAGE.read_text(), re.M)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            line = line.replace("10.0.0.1:29500", f"127.0.0.1:{probe.getsockname()[1]}")
        command = [*line.split(), *arguments, "--on", "job", "--out", str(tmp_path / "run")]
        for index in range(2 if launcher == "torchrun" else 1):
            with (tmp_path / f"log-{index}").open("w") as log:
                process = subprocess.Popen(
                    command, cwd=tmp_path, env=environment(tmp_path) | variables, stdout=log, stderr=subprocess.STDOUT
                )
            started.append(process)
        return started

    yield start
    for process in started:
        process.terminate()  # not killed: launchers end what they have started
    for process in started:
        process.wait(60)


def ended(processes, folder):
    """Their exit statuses, and what they printed."""
    statuses = [process.wait(TIMEOUT_S) for process in processes]
    return statuses, "".join((folder / f"log-{index}").read_text() for index in range(len(processes)))


def run(start, launcher, folder, *arguments):
    """Runs a benchmark to its end; gives its rows."""
    processes = start(launcher, *arguments)
    statuses, printed = ended(processes, folder)
    assert json.loads((folder / "run" / "options.json").read_text())["on"] == "job"
    rows, broken = read_rows(folder / "run" / "metrics.jsonl")
    assert not broken and {row["job_hosts"] for row in rows} == {WHERE[launcher]}
    assert all(row["launcher"].startswith(f"{launcher}: {WHERE[launcher]} (") for row in rows)
    checks = [row["check"] for row in rows]
    assert not [check for check in checks if check.startswith(("FAILED", "WRONG"))], printed
    assert not any(statuses) or "MISSED" in checks, printed  # a gate may, where ranks share cores
    assert f", on {WHERE[launcher]}</h2>" in (folder / "run" / "report.html").read_text()
    return rows


@pytest.mark.full
@pytest.mark.mpi
def test_collectives_run_on_all_hosts(start, tmp_path):
    sizes = ["--sizes-mb", "0.01", "--steps", "5"]
    rows = run(start, "Open MPI", tmp_path, "collectives", "--quick", *sizes)
    called = [row for row in rows if "rounds_ms" in row]
    assert {(row["framework"], row["backend"], row["num_ranks"]) for row in called} == {
        ("jaxddp", "XLA over Gloo", 2),
        ("torchref", "Gloo", 2),
    }


@pytest.mark.full
@pytest.mark.parametrize("launcher", [pytest.param(name, marks=MARKS.get(name, [])) for name in LAUNCHERS])
def test_strategies_run_to_the_end(launcher, start, tmp_path):
    some = ["--strategies", "bucketed", "zero1", "jit", "DistributedDataParallel"]
    rows = run(start, launcher, tmp_path, "strategies", "--quick", *some)
    steps = [row for row in rows if "rounds_ms" in row]
    assert {row["ranks"] for row in steps} == {
        "2 processes of one CPU device on one core, 1 on each of 2 hosts",
        "2 processes of 1 thread(s), 1 on each of 2 hosts",
    }
    assert {row["strategy"] for row in steps} == set(some[1:])


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["buckets", "scaling", "gates"])
def test_other_benchmarks_run_with_several_ranks_a_host(benchmark, start, tmp_path):
    small = ["--model", "byte_shallow", "--batch-size", "4", "--ranks", "4"]
    rows = run(start, "torchrun", tmp_path, benchmark, "--quick", *small)
    backends = {row["backend"] for row in rows if row.get("num_ranks") == 4 and "rounds_ms" in row}
    assert backends == {"Gloo", "XLA over Gloo", "XLA over Gloo, a process a host"}


@pytest.mark.full
def test_when_the_first_process_is_killed_the_other_ends_with_its_ranks(start, tmp_path):
    processes = start("torchrun", "strategies", "--quick")
    deadline = time.monotonic() + TIMEOUT_S
    while not (began := [index for index in range(2) if "torchref: " in (tmp_path / f"log-{index}").read_text()]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    first = processes[began[0]]
    children = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True).stdout.split()
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    statuses, printed = ended(processes, tmp_path)
    assert all(statuses)
    assert "error: process 0 of 2 has ended, or cannot be reached" in printed
