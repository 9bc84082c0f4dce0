"""What each launcher's variables say of the job, and what is refused."""

import os
import subprocess
import sys

import pytest

from jaxddp.comparison_test import refusal

from . import job
from .job import Job, find_job, find_job_or, keep_to_loopback, visible_gpus, waits

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[007-008]",
}  # fmt: skip


@pytest.mark.parametrize(
    "environment, launcher, host, port",
    [
        (TORCHRUN, "torchrun", "10.0.0.1", 29500),
        (OPEN_MPI, "Open MPI", "10.96.0.1", 61440 + 1531576320 // 4096 % 4096),
        (SLURM, "SLURM", "gpu007", 61440 + 7 * 16 + 1),
        (SLURM | OPEN_MPI | TORCHRUN, "torchrun", "10.0.0.1", 29500),  # the innermost launcher counts
        (SLURM | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"}, "SLURM", "10.0.0.9", 1234),
    ],
)
def test_a_launcher_is_recognised(environment, launcher, host, port):
    assert find_job(environment) == Job(launcher, 4, 3, 2, 1, 2, host, port)


def test_hosts_of_a_step_may_have_unlike_numbers_of_tasks():
    full = SLURM | {"SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "3"}  # four on one host, one on the other
    assert find_job(full).local_devices(4) == [3]


@pytest.mark.parametrize(
    "nodes, first",
    [("n1", "n1"), ("n1,n4", "n1"), ("a[001-4],b2", "a001"), ("a[7,9-12]", "a7"), ("r[1-2]-ib", "r1-ib")],
)
def test_the_first_host_of_a_step_coordinates(nodes, first):
    assert find_job(SLURM | {"SLURM_STEP_NODELIST": nodes}).host == first


def test_a_job_on_one_host_stays_on_loopback_and_a_batch_script_is_in_none():
    assert find_job(SLURM | {"SLURM_STEP_NUM_NODES": "1"}).host == "127.0.0.1"
    assert find_job(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).host == "127.0.0.1"
    assert find_job({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) is None


@pytest.mark.parametrize(
    "num_local, local, num_visible, devices",
    [(1, 0, 8, list(range(8))), (8, 5, 8, [5]), (8, 5, 1, [0]), (2, 1, 8, [1]), (4, 3, 0, [])],
)
def test_devices_follow_from_the_launcher(num_local, local, num_visible, devices):
    assert Job("SLURM", 16, 0, num_local, local, 2, "n0", 1).local_devices(num_visible) == devices
    found = refusal(Job("SLURM", 9, 5, 9, 5, 1, "n0", 1).local_devices, 4)
    assert found.startswith("num_local_processes (=9) must be at most the devices ")


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n0"}, r"MASTER_PORT \(=''\) must be a number, as"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR must name the host of process 0"),
        (TORCHRUN | {"WORLD_SIZE": "\u00b2"}, r"WORLD_SIZE \(='.'\) must be a number, as"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, r"WORLD_SIZE \(='0'\) must be a number, as"),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""}, "MASTER_ADDR must name the host of process 0"),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[1-2]n[3-4]"}, "MASTER_ADDR must name the host of process 0"),
    ],
)
def test_half_a_job_is_refused(environment, message):
    with pytest.raises(ValueError, match=message):
        find_job(environment)


def test_a_job_by_hand():
    assert find_job_or("n0:1234", 2, 1) == Job("address", 2, 1, 1, 0, 2, "n0", 1234)
    assert "must be host:port" in refusal(find_job_or, "host:http", 2, 0)
    assert "process_id (=None) must be" in refusal(find_job_or, "n0:1234", 2, None)


def test_with_gpus_per_task_all_that_a_process_sees_are_its_own():
    assert find_job(SLURM).local_devices(4) == [1]
    found = find_job(SLURM | {"SLURM_GPUS_PER_TASK": "4"})
    assert found.local_devices(4) == [0, 1, 2, 3]
    assert found._replace(num_local_processes=4, local_process_id=3).local_devices(2) == [0, 1]


def test_gpus_are_those_that_may_be_opened_whatever_the_driver_lists(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia2", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(job, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(job.os, "access", lambda path, mode: path.name != "nvidia2")  # as a cgroup does
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-11,MIG-5,7")
    assert visible_gpus() == ["2", "GPU-11", "MIG-5", "7"]


def test_how_long_to_wait(monkeypatch):
    monkeypatch.delenv(job.STUCK_S, raising=False)
    assert waits(None, None) == (300, 600) and waits(None, 6) == (60, 6)
    monkeypatch.setenv(job.STUCK_S, "200.0")
    assert waits(None, None) == (100, 200) and waits(5, 6) == (5, 6)
    assert refusal(waits, None, 0).startswith("stuck_s (=0) must be a positive finite number")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has another name")
def test_a_job_on_one_host_keeps_nccl_and_gloo_on_loopback(monkeypatch):
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    keep_to_loopback(find_job(SLURM))
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    one = find_job(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    keep_to_loopback(one)
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("lo", "eth7")


def test_lines_of_unbuffered_processes_that_share_standard_error_stay_whole():
    script = "from jaxddp.processes.job import print_line\nfor _ in range(2000): print_line('x' * 50)"
    with subprocess.Popen(
        ["sh", "-c", '"$0" -u -c "$1" & "$0" -u -c "$1"; wait', sys.executable, script],
        stderr=subprocess.PIPE,
        text=True,
    ) as shell:
        lines = shell.stderr.read().splitlines()
    assert lines == 4000 * ["x" * 50]
