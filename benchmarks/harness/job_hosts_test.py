"""The hosts of a job, here the first process and a thread for another: results, failures, and who ends when."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.job_hosts import JobHosts, job_fields, job_of, serve
from benchmarks.harness.ranks import Ranks, chosen_ranks, ranks_of_machine
from jaxddp.processes.job import Job
from torchref.launch import RankError, report

HOST = socket.gethostname()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Others:
    """The processes of a job but the first, as threads; ``status`` has their exit status."""

    def __init__(self, num_hosts):
        port, self.status = free_port(), {}
        self.jobs = [Job("SLURM", num_hosts, i, 1, 0, num_hosts, "127.0.0.1", port) for i in range(num_hosts)]
        self.threads = [threading.Thread(target=self._serve, args=(job,), daemon=True) for job in self.jobs[1:]]
        for thread in self.threads:
            thread.start()

    def _serve(self, job):
        self.status[job.process_id] = serve(job, 0)

    def join(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.status


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module")
def hosts():
    others = Others(2)
    with JobHosts(others.jobs[0], 0) as opened:
        yield opened
    assert others.join() == {1: 0}


def total(ranks, of_each):
    value = torch.tensor([float(of_each + dist.get_rank())])
    dist.all_reduce(value)
    report(("doing", f"rank {dist.get_rank()}"))
    return dist.get_rank(), float(value), ranks.num, os.environ["GLOO_SOCKET_IFNAME"]


def test_ranks_of_all_hosts_are_one_group(hosts):
    said = []
    found = ranks_of_machine(4, "job").run_torch(total, 10, on_message=lambda rank, message: said.append(message))
    assert found == [(rank, 46.0, 4, "lo") for rank in range(4)]
    assert sorted(said) == [("doing", "rank 0"), ("doing", "rank 1")]  # of the first host


def fail(ranks, rank, how):
    if dist.get_rank() == rank:
        time.sleep(0.5)
        if how == "dies":
            os.kill(os.getpid(), 9)
        raise RuntimeError("out of luck")
    dist.barrier()


@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "how", "why"),
    [
        (1, "raises", "RuntimeError: out of luck"),
        (0, "raises", "RuntimeError: out of luck"),
        (1, "dies", r"killed by signal 9 \(SIGKILL\)"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_host_and_ends_the_others(hosts, rank, how, why):
    began = time.monotonic()
    with pytest.raises(RankError, match=f"^rank {rank} of 2 on {HOST} failed: {why}"):
        ranks_of_machine(2, "job").run_torch(fail, rank, how)
    assert time.monotonic() - began < 40
    assert ranks_of_machine(1, "job").run_torch(total, 10) == [(0, 10.0, 1, "lo")]  # the first host goes on


def end_process(ranks):
    """Runs until its host is gone."""
    dist.barrier()
    time.sleep(60)


def test_a_host_that_is_gone_ends_the_call_and_each_later_one():
    others = Others(2)
    with JobHosts(others.jobs[0], 0) as hosts:
        (connection,) = hosts._connections.values()
        threading.Timer(3.0, connection.shutdown, [socket.SHUT_RDWR]).start()
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(RankError, match=rf"^the process on {HOST} \(1 of 2\) has ended$"):
                ranks_of_machine(2, "job").run_torch(end_process)
        assert time.monotonic() - began < 50  # not when its ranks would have ended
    assert others.join() == {1: 1}  # and it ends, without the first process


def test_ranks_are_spread_over_the_hosts(hosts):
    assert ranks_of_machine(4, "job") == Ranks(4, "processes", (), (2, 2), "127.0.0.1")
    assert ranks_of_machine(4, "job").in_words == "4 ranks, 2 on each of 2 hosts"
    assert ranks_of_machine(1, "job").per_host == (1,)
    assert chosen_ranks(None, 2, "job").per_host == (1, 1)
    assert chosen_ranks(None, 5, "job").per_host == (2, 2)
    with pytest.raises(ValueError, match=r"^ranks \(=3\) must be divisible by the number of the job's hosts \(=2\)$"):
        ranks_of_machine(3, "job")
    one, again = ranks_of_machine(4, "job").layouts()
    assert (one.processes(True), again.processes(True), again.processes(False)) == ((2, 2), (1, 1), (2, 2))
    assert again.backend["jaxddp"] == "XLA over Gloo, a process a host"
    assert ranks_of_machine(2, "job").layouts() == [ranks_of_machine(2, "job")]


def test_gpus_of_all_hosts_are_taken(hosts, monkeypatch):
    monkeypatch.setattr(hosts, "num_gpus", 4)
    assert chosen_ranks(None, 2, "job", batch_size=24) == Ranks(8, "gpus", (), (4, 4), "127.0.0.1")
    assert chosen_ranks(None, 2, "job", batch_size=12).per_host == (3, 3)
    with pytest.raises(ValueError, match=r"^ranks \(=10\) must be at most the number of the job's GPUs \(=8\)$"):
        ranks_of_machine(10, "job")


def test_rows_name_the_job(hosts):
    assert job_fields() == {
        "job_hosts": "2 hosts",
        "launcher": f"SLURM: 2 hosts ({HOST}, {HOST}), coordinator 127.0.0.1",
    }


def test_without_a_job(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "OMPI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    rule = r"^on \(=job\) must be in a job: start a process on each host with srun, torchrun or mpirun$"
    with pytest.raises(ValueError, match=rule):
        job_of("strategies", "job", None)
    with pytest.raises(ValueError, match=r"^on \(=job\) is for main, .*, not for memory$"):
        job_of("memory", "job", None)
    assert job_of("memory", None, "folder") is None
