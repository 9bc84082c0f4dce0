"""Functions that ranks run stand at the top: other processes import them by name."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchref.launch import RankError, RankPool, init_from_env, launch, report, shared_pool


def rank_and_size(offset=0):
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def leave_a_mark(rank):
    assert threading.active_count() == 1 and not dist.is_initialized()
    os.environ["MARK"] = os.environ.get("MARK", "") + f"rank {rank}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"


def read_the_mark():
    return os.environ.get("MARK"), dist.get_rank()


def refuse(rank):
    if rank == 1:
        raise ValueError("this rank stays out")


def process_id():
    return os.getpid()


def settings():
    return torch.get_num_threads(), os.environ.get("GLOO_SOCKET_IFNAME"), dist.get_backend()


def double(tensor):
    return tensor * 2


def leave_the_group():
    dist.destroy_process_group()


def report_progress(num_steps):
    for step in range(num_steps):
        report({"step": step, "rank": dist.get_rank()})
    return num_steps


def report_then_wait_for(path):
    report("started")
    while not Path(path).exists():
        time.sleep(0.01)


def late_report():
    threading.Timer(0.3, report, ["too late"]).start()


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("no such thing\nand more about it")
    dist.barrier()  # for ever: one rank does not come


def leave_with_code_3():
    os._exit(3)


def die_with_a_forked_child():
    if os.fork() == 0:
        # It inherits the rank's ends of all pipes and keeps them open after the rank's death.
        time.sleep(5)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def join_the_group_that_the_environment_describes(port):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = init_from_env("gloo")
    return rank_and_size(), str(device)


def report_now_and_then(num_reports, sleeper=None):
    for index in range(num_reports):
        time.sleep(0.8)
        if dist.get_rank() == index % 2:  # one of them is enough
            report(index)
    if dist.get_rank() == sleeper:
        time.sleep(60)
    return num_reports


def report_and_wait():
    report(os.getpid())
    if dist.get_rank() == 0:
        dist.barrier()  # for ever: the others sleep
    time.sleep(60)


def sleep_on(sleepers, seconds=60.0):
    if dist.get_rank() in sleepers:
        time.sleep(seconds)


def cannot_be_pickled():
    return threading.Lock()


def start_a_child():
    import multiprocessing

    child = multiprocessing.get_context("spawn").Process(target=os.getpid)
    child.start()
    child.join()
    return child.exitcode


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        # A zombie is gone but for its entry, unless it is only its first thread that has ended so far.
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids, seconds=10.0):
    deadline_s = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(is_running(pid) for pid in pids)


def test_results_come_by_rank_from_a_group_of_exactly_that_size(ranks):
    for num_ranks in (1, 3, 2):
        total = sum(range(num_ranks)) + 10 * num_ranks
        expected = [(rank, num_ranks, total) for rank in range(num_ranks)]
        assert ranks.run(rank_and_size, 10, num_ranks=num_ranks) == expected


def test_rank_processes_stay_between_calls(ranks):
    first = ranks.run(process_id, num_ranks=3)
    assert len({*first, os.getpid()}) == 4
    assert ranks.run(process_id, num_ranks=2) == first[:2]


def test_ranks_use_the_asked_threads_backend_and_loopback(ranks):
    loopback = os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else None)
    assert ranks.run(settings, num_ranks=2) == [(1, loopback, "gloo")] * 2
    assert launch(settings, num_ranks=1, threads_per_rank=2) == [(2, loopback, "gloo")]


def test_prepare_is_called_once_in_each_process_before_anything_starts():
    with RankPool(2, prepare=leave_a_mark) as pool:
        assert pool.run(read_the_mark) == [("rank 0", 0), ("rank 1", 1)]
        assert pool.run(read_the_mark, num_ranks=1) == [("rank 0", 0)]
    assert "MARK" not in os.environ


def test_an_error_in_prepare_is_that_ranks():
    with pytest.raises(RankError) as caught:
        launch(process_id, num_ranks=2, prepare=refuse)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 2 failed: ValueError: this rank stays out"
    assert '    raise ValueError("this rank stays out")' in lines


def test_tensors_travel_both_ways(ranks):
    tensor = torch.arange(5, dtype=torch.bfloat16, requires_grad=True)
    for result in ranks.run(double, tensor, num_ranks=2):
        assert torch.equal(result, tensor * 2)


def test_a_rank_may_leave_the_group_itself(ranks):
    assert ranks.run(leave_the_group, num_ranks=2) == [None, None]
    assert ranks.run(rank_and_size, num_ranks=2) == [(0, 2, 1), (1, 2, 1)]


def test_a_rank_may_start_processes_of_its_own(ranks):
    assert ranks.run(start_a_child, num_ranks=1) == [0]


def test_reports_arrive_in_each_ranks_order(ranks):
    messages = []
    ranks.run(report_progress, 3, num_ranks=2, on_message=lambda rank, message: messages.append((rank, message)))
    for rank in range(2):
        of_rank = [message for sender, message in messages if sender == rank]
        assert of_rank == [{"step": step, "rank": rank} for step in range(3)]
    assert ranks.run(report_progress, 3, num_ranks=2) == [3, 3]


def test_reports_arrive_while_the_rank_runs(ranks, tmp_path):
    go_on = tmp_path / "go on"
    # The rank ends only after the parent has acted on its report.
    ranks.run(report_then_wait_for, str(go_on), num_ranks=1, on_message=lambda rank, message: go_on.touch())


def test_a_late_report_goes_nowhere(ranks):
    messages = []
    ranks.run(late_report, num_ranks=1)
    time.sleep(0.6)
    ranks.run(process_id, num_ranks=1, on_message=lambda rank, message: messages.append(message))
    assert messages == []


def test_report_outside_of_a_rank_does_nothing():
    report(threading.Lock())  # which could not be sent


def test_an_error_in_a_rank_is_told_with_its_own_traceback_and_ends_the_others(ranks):
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(raise_on, 1, num_ranks=2)
    assert time.monotonic() - started_s < 20  # of 120: rank 0 waits in a barrier
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 2 failed: ValueError: no such thing"
    assert "Traceback (most recent call last):" in lines
    assert '    raise ValueError("no such thing\\nand more about it")' in lines
    assert lines[-1] == "and more about it"
    assert "rank_process.py" not in str(caught.value)
    assert [result[0] for result in ranks.run(rank_and_size, num_ranks=2)] == [0, 1]


def test_a_rank_that_dies_is_noticed_at_once(ranks):
    ranks.run(process_id, num_ranks=1)
    with pytest.raises(RankError, match="^rank 0 of 1 failed: exited with code 3\n"):
        ranks.run(leave_with_code_3, num_ranks=1)
    ranks.run(process_id, num_ranks=1)
    started_s = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 0 of 1 failed: killed by signal 9 \(SIGKILL\)\n"):
        ranks.run(die_with_a_forked_child, num_ranks=1)
    assert time.monotonic() - started_s < 4  # the forked child lives for 5


def test_a_rank_killed_from_outside_is_noticed_and_replaced(ranks):
    before = ranks.run(process_id, num_ranks=2)

    def kill_rank_1(rank, pid):
        if rank == 1:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: killed by signal 9 \(SIGKILL\)\n"):
        ranks.run(report_and_wait, num_ranks=2, on_message=kill_rank_1)
    between = ranks.run(process_id, num_ranks=2)
    assert wait_until_gone(before) and not set(before) & set(between)

    os.kill(between[0], signal.SIGKILL)  # while idle
    assert wait_until_gone(between[:1])
    after = ranks.run(process_id, num_ranks=2)
    assert after[0] != between[0] and after[1] == between[1]


@pytest.mark.parametrize(("sleepers", "num_ranks", "names"), [([0, 2], 3, "ranks 0, 2"), ([0], 1, "rank 0")])
def test_a_timeout_names_the_ranks_that_did_not_finish_and_ends_them(ranks, sleepers, num_ranks, names):
    pids = ranks.run(process_id, num_ranks=num_ranks)
    said = rf"^{names} of {num_ranks} did not finish or report within timeout_s \(=1.0\)$"
    with pytest.raises(RankError, match=said):
        ranks.run(sleep_on, sleepers, num_ranks=num_ranks, timeout_s=1.0)
    assert wait_until_gone(pids)


def test_each_report_begins_the_timeout_anew(ranks):
    assert ranks.run(report_now_and_then, 5, num_ranks=2, timeout_s=3.0) == [5, 5]
    started_s = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 of 2 did not finish or report within timeout_s \(=3.0\)$"):
        ranks.run(report_now_and_then, 2, 1, num_ranks=2, timeout_s=3.0)
    assert time.monotonic() - started_s < 20


def test_a_result_that_does_not_pickle_is_the_ranks_error(ranks):
    with pytest.raises(RankError, match=r"^rank 0 of 1 failed: TypeError: cannot pickle '_thread.lock' object"):
        ranks.run(cannot_be_pickled, num_ranks=1)


def test_an_error_in_on_message_ends_the_call(ranks):
    pids = []

    def call_again(rank, pid):
        pids.append(pid)
        ranks.run(process_id)

    with pytest.raises(
        ValueError, match="^this RankPool is busy with another call: every thread needs a pool of its own$"
    ):
        ranks.run(report_and_wait, num_ranks=1, on_message=call_again)
    assert wait_until_gone(pids)


def test_close_ends_all_processes_and_is_final():
    with RankPool(1) as pool:
        pids = pool.run(process_id)
        assert all(is_running(pid) for pid in pids)
        folder = pool._folder
        assert os.path.isdir(folder)
    assert not any(is_running(pid) for pid in pids)
    assert not os.path.exists(folder)
    pool.close()
    with pytest.raises(ValueError, match="^this RankPool is closed$"):
        pool.run(process_id)


def test_errors_name_the_value_and_the_rule(ranks):
    wrongs: list[Any] = [0, -1, 2.0, True]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=rf"^num_ranks \(={wrong}\) must be a positive integer$"):
            launch(process_id, num_ranks=wrong)
        with pytest.raises(ValueError, match=rf"^max_ranks \(={wrong}\) must be a positive integer$"):
            RankPool(wrong)
        with pytest.raises(ValueError, match=rf"^num_ranks \(={wrong}\) must be a positive integer$"):
            ranks.run(process_id, num_ranks=wrong)
    with pytest.raises(ValueError, match=r"^threads_per_rank \(=0\) must be a positive integer$"):
        RankPool(1, threads_per_rank=0)
    with pytest.raises(ValueError, match=r"^num_ranks \(=9\) must be at most max_ranks \(=8\)$"):
        ranks.run(process_id, num_ranks=9)
    with pytest.raises(ValueError, match=r"^timeout_s \(=0\) must be positive$"):
        ranks.run(process_id, timeout_s=0)
    with pytest.raises(ValueError, match=r"^unknown backend 'mpi': one of gloo, nccl$"):
        launch(process_id, num_ranks=1, backend="mpi")
    with pytest.raises(ValueError, match=r"^fn \(=<function .*<lambda>.*\) and its arguments must pickle: .*"):
        ranks.run(lambda: None)
    with pytest.raises(ValueError, match=r"^prepare \(=<function .*<lambda>.*\) must pickle: .*"):
        RankPool(1, prepare=lambda rank: None)


def test_nccl_needs_a_device_per_rank(monkeypatch):
    environment = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for num_devices in (0, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=num_devices: number)
        rule = rf"\(=3\) must be at most the number of CUDA devices \(={num_devices}\) for NCCL$"
        with pytest.raises(ValueError, match=rf"^num_ranks {rule}"):
            launch(process_id, num_ranks=3, backend="nccl")
        with pytest.raises(ValueError, match=rf"^max_ranks {rule}"):
            RankPool(3, backend="nccl")
        with pytest.raises(ValueError, match=rf"^LOCAL_RANK \+ 1 {rule}"):
            init_from_env("nccl")


def test_init_from_env_wants_torchruns_variables(monkeypatch):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        ValueError,
        match="^WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set in the environment: start this program with torchrun$",
    ):
        init_from_env()


def test_init_from_env_joins_the_group_that_the_environment_describes(ranks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = ranks.run(join_the_group_that_the_environment_describes, port, num_ranks=2)
    assert results == [((0, 2, 1), "cpu"), ((1, 2, 1), "cpu")]


def run_script(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(text)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def next_words(process, first):
    """The rest of the next line that begins so; some versions of Gloo print lines of their own."""
    for line in process.stdout:
        if line.split()[:1] == [first]:
            return line.split()[1:]
    return None


PARENT = """
import ctypes, os, threading, time
import torch.distributed as dist
from torchref.launch import RankPool, report

def stay(hold_the_lock):
    report("busy:")
    if dist.get_rank() == 1:
        dist.barrier()  # for ever: rank 0 does not come
    if hold_the_lock:
        ctypes.PyDLL(None).sleep(600)  # a C function that never lets Python run
    time.sleep(600)

def run(num_ranks, num_busy, hold_the_lock=False):
    pool = RankPool(num_ranks)
    print("pids:", *pool.run(os.getpid), flush=True)
    if num_busy > 0:
        pool.run(stay, hold_the_lock, num_ranks=num_busy, on_message=lambda rank, word: print(word, flush=True))

if __name__ == "__main__":
"""


@pytest.mark.parametrize(
    ("start", "num_ranks", "num_busy", "how"),
    [
        ("run(2, 2, hold_the_lock=True)", 2, 2, signal.SIGKILL),  # ended by the kernel alone
        # From a thread the kernel's help is not available, only the end of the pipe.
        ("thread = threading.Thread(target=run, args=[1, 1]); thread.start(); thread.join()", 1, 1, signal.SIGKILL),
        ("run(2, 1)", 2, 1, signal.SIGINT),
        ("run(1, 0)", 1, 0, None),  # the parent ends by itself, with a pool left open
    ],
    ids=["killed", "killed with a pool in a thread", "interrupted", "left open"],
)
def test_no_rank_outlives_its_parent(tmp_path, start, num_ranks, num_busy, how):
    process = run_script(tmp_path, f"{PARENT}    {start}\n")
    pids: list[int] = []
    try:
        pids += map(int, next_words(process, "pids:"))
        assert len(pids) == num_ranks
        for _ in range(num_busy):
            assert next_words(process, "busy:") == []
        if how is not None:
            assert all(is_running(pid) for pid in pids)
        if how == signal.SIGKILL:
            process.kill()
        elif how == signal.SIGINT:
            os.killpg(process.pid, how)  # Ctrl-C on a terminal reaches all processes
        process.wait(timeout=30)
        assert wait_until_gone(pids)
        # The parent says so, its ranks do not.
        assert process.stderr.read().count("KeyboardInterrupt") == (how == signal.SIGINT)
    finally:
        for pid in [process.pid, *pids]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_an_unguarded_script_is_told_what_is_missing(tmp_path):
    process = run_script(tmp_path, "import os\nfrom torchref.launch import launch\nlaunch(os.getpid, num_ranks=1)\n")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "torchref.launch.RankError: rank 0 of 1 failed: exited with code 1" in err
    assert 'a script must guard what starts ranks with `if __name__ == "__main__":`' in err


def test_shared_pool_is_one_pool_of_eight(ranks):
    assert shared_pool() is ranks
    assert ranks.max_ranks == 8
