"""Ranks as processes: results, messages, and every way to end. Ranks import the functions at the top by name."""

import operator
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchref.launch import RankError, RankPool, init_from_env, launch, report
from torchref.script_test import free_port, is_running, wait_until_gone


def rank_and_size(offset=0):
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def set_a_mark(rank):
    assert threading.active_count() == 1 and not dist.is_initialized()
    os.environ["MARK"] = os.environ.get("MARK", "") + f"rank {rank}"


def read_the_mark():
    return os.environ.get("MARK"), dist.get_rank()


def refuse(rank):
    raise ValueError("this rank stays out")


def settings():
    return torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("no such thing\nand more about it")
    dist.barrier()  # forever: one rank never arrives


def die_with_a_forked_child():
    if os.fork() == 0:
        # It inherits the rank's ends of all pipes and keeps them open after the rank's death.
        time.sleep(5)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def report_and_wait():
    report(os.getpid())
    if dist.get_rank() == 0:
        dist.barrier()  # forever: the others sleep
    time.sleep(60)


def report_until(path):
    for step in range(3):
        report((step, dist.get_rank()))
    while not Path(path).exists():
        time.sleep(0.01)


def report_now_and_then(num_reports, sleepers=()):
    for index in range(num_reports):
        time.sleep(0.5)
        if dist.get_rank() == index % 2:  # one of them is enough
            report(index)
    if dist.get_rank() in sleepers:
        time.sleep(60)
    return num_reports


def test_results_are_in_rank_order_from_processes_that_stay(ranks):
    first = ranks.run(os.getpid, num_ranks=3)
    assert len({*first, os.getpid()}) == 4
    for num_ranks in (1, 3, 2):
        total = sum(range(num_ranks)) + 10 * num_ranks
        expected = [(rank, num_ranks, total) for rank in range(num_ranks)]
        assert ranks.run(rank_and_size, 10, num_ranks=num_ranks) == expected
    tensor = torch.arange(5, dtype=torch.bfloat16, requires_grad=True)
    for result in ranks.run(operator.mul, tensor, 2, num_ranks=2):
        assert torch.equal(result, tensor * 2)
    assert ranks.run(dist.destroy_process_group, num_ranks=2) == [None, None]
    assert ranks.run(os.getpid, num_ranks=2) == first[:2]


def test_ranks_use_one_thread_and_loopback(ranks):
    interfaces = (os.environ.get(f"{library}_SOCKET_IFNAME", "lo") for library in ("GLOO", "NCCL"))
    assert ranks.run(settings, num_ranks=2) == [(1, *interfaces)] * 2


@pytest.mark.full
def test_prepare_is_called_once_in_each_process_before_anything_starts_and_close_ends_all():
    with RankPool(2, prepare=set_a_mark) as pool:
        assert pool.run(read_the_mark) == [("rank 0", 0), ("rank 1", 1)]
        assert pool.run(read_the_mark, num_ranks=1) == [("rank 0", 0)]
        pids = pool.run(os.getpid)
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    with pytest.raises(RankError, match=r"^rank 0 of 1 failed: ValueError: this rank stays out\n"):
        launch(os.getpid, num_ranks=1, prepare=refuse)


def test_an_error_in_a_rank_ends_the_others_and_shows_its_traceback(ranks):
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(raise_on, 1, num_ranks=2)
    assert time.monotonic() - started_s < 60  # of 120: rank 0 waits in a barrier
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 2 failed: ValueError: no such thing"
    assert '    raise ValueError("no such thing\\nand more about it")' in lines
    with pytest.raises(RankError, match=r"^rank 0 of 1 failed: TypeError: cannot pickle '_thread.lock' object"):
        ranks.run(threading.Lock, num_ranks=1)


def test_a_rank_that_dies_is_noticed_at_once(ranks):
    with pytest.raises(RankError, match="^rank 0 of 1 failed: exited with code 3\n"):
        ranks.run(os._exit, 3, num_ranks=1)
    ranks.run(os.getpid, num_ranks=1)
    started_s = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 0 of 1 failed: killed by signal 9 \(SIGKILL\)\n"):
        ranks.run(die_with_a_forked_child, num_ranks=1)
    assert time.monotonic() - started_s < 4  # the forked child lives for 5


def test_a_rank_killed_from_outside_is_noticed_and_replaced(ranks):
    before = ranks.run(os.getpid, num_ranks=2)
    os.kill(before[0], signal.SIGKILL)  # while idle
    ranks._workers[0].process.join(10)  # a forkserver says a moment later that it is gone

    def kill_rank_1(rank, pid):
        if rank == 1:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: killed by signal 9 \(SIGKILL\)\n"):
        ranks.run(report_and_wait, num_ranks=2, on_message=kill_rank_1)
    assert wait_until_gone(before) and not set(before) & set(ranks.run(os.getpid, num_ranks=2))


@pytest.mark.full
def test_each_report_restarts_the_timeout_which_names_the_ranks(ranks):
    assert ranks.run(report_now_and_then, 5, num_ranks=2, timeout_s=2.0) == [5, 5]
    pids = ranks.run(os.getpid, num_ranks=2)
    with pytest.raises(RankError, match=r"^rank 1 of 2 did not finish or report within timeout_s \(=2.0\)$"):
        ranks.run(report_now_and_then, 1, (1,), num_ranks=2, timeout_s=2.0)
    assert wait_until_gone(pids)


def never_leave():
    dist.destroy_process_group = lambda: time.sleep(60)
    return os.getpid()


@pytest.mark.full
def test_a_rank_that_does_not_leave_its_group_is_replaced(monkeypatch):
    monkeypatch.setattr("torchref.launch._LEAVE_TIMEOUT_S", 0.5)
    with RankPool(1) as pool:
        before = pool.run(never_leave)
        assert wait_until_gone(before) and pool.run(os.getpid) != before


@pytest.mark.full
def test_a_rank_that_hangs_says_where_it_is(capfd):
    with RankPool(1) as pool, pytest.raises(RankError, match="did not finish"):
        pool.run(report_now_and_then, 0, (0,), timeout_s=1.0)
    assert "in report_now_and_then\n" in capfd.readouterr().err


def test_reports_arrive_in_order_while_the_rank_runs(ranks, tmp_path):
    messages = []

    def go_on(rank, message):
        messages.append((message, rank))
        if len(messages) == 6:  # ranks end only after the parent has acted on their reports
            (tmp_path / "go on").touch()

    ranks.run(report_until, str(tmp_path / "go on"), num_ranks=2, on_message=go_on)
    assert sorted(messages) == [((step, rank), rank) for step in range(3) for rank in range(2)]
    assert [step for (step, _), rank in messages if rank == 1] == [0, 1, 2]
    report(threading.Lock())  # outside of a rank nothing is sent


def test_an_error_in_on_message_ends_the_call(ranks):
    pids = []
    with pytest.raises(AttributeError):
        ranks.run(report_and_wait, num_ranks=1, on_message=lambda rank, pid: (pids.append(pid), pid.no_such_name))
    assert wait_until_gone(pids)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_ranks": 0}, r"num_ranks \(=0\) must be a positive integer"),
        ({"num_ranks": 9}, r"num_ranks \(=9\) must be at most max_ranks \(=8\)"),
        ({"num_ranks": 1, "backend": "mpi"}, "unknown backend 'mpi': one of gloo, nccl"),
    ],
)
def test_errors_name_the_value_and_the_rule(ranks, options, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        launch(os.getpid, **options) if options["num_ranks"] < 9 else ranks.run(os.getpid, **options)


def test_nccl_needs_a_device_per_rank(monkeypatch):
    environment = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for num_devices in (0, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=num_devices: number)
        with pytest.raises(ValueError, match=rf"^num_ranks \(=3\) must be at most .* \(={num_devices}\) for NCCL$"):
            launch(os.getpid, num_ranks=3, backend="nccl")
        # Alone with one device or none, a process takes the first; three do not share two.
        rule = "must be at most the devices" if num_devices else "must be at most the CUDA devices"
        with pytest.raises(ValueError, match=rf"{rule}.* \(={num_devices}\)"):
            init_from_env("nccl")


def test_init_from_env_names_a_coordinator_that_does_not_answer():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"^coordinator {address} of process 0 must answer within 0.2 s: "):
            init_from_env("gloo", address, 2, 1, timeout_s=0.2)


def test_a_collective_may_wait_longer_than_a_rank_may_be_stuck(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    init_from_env("gloo", f"127.0.0.1:{free_port()}", 1, 0, stuck_s=7200)
    try:
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds() > 7200
    finally:
        dist.destroy_process_group()
