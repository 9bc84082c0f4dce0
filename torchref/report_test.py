"""Messages from running ranks. Ranks import the functions at the top by name."""

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from torchref.launch import RankError, report
from torchref.launch_test import process_id, report_and_wait
from torchref.script_test import wait_until_gone


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


def report_now_and_then(num_reports, sleeper=None):
    for index in range(num_reports):
        time.sleep(0.5)
        if dist.get_rank() == index % 2:  # one of them is enough
            report(index)
    if dist.get_rank() == sleeper:
        time.sleep(60)
    return num_reports


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


def test_a_late_report_is_dropped(ranks):
    messages = []
    ranks.run(late_report, num_ranks=1)
    time.sleep(0.6)
    ranks.run(process_id, num_ranks=1, on_message=lambda rank, message: messages.append(message))
    assert messages == []


def test_report_outside_of_a_rank_does_nothing():
    report(threading.Lock())  # which could not be sent


def test_each_report_restarts_the_timeout(ranks):
    assert ranks.run(report_now_and_then, 5, num_ranks=2, timeout_s=2.0) == [5, 5]
    started_s = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 of 2 did not finish or report within timeout_s \(=2.0\)$"):
        ranks.run(report_now_and_then, 2, 1, num_ranks=2, timeout_s=2.0)
    assert time.monotonic() - started_s < 20


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
