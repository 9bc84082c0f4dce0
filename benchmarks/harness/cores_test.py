import os

import pytest

from benchmarks.harness.cores import keep_to_cores, num_cores
from benchmarks.harness.ranks import Ranks
from benchmarks.training.measure import ranks_in_words


@pytest.mark.parametrize(
    ("ranks", "rank", "kept"),
    [
        (Ranks(1, "simulated"), 0, [{2}]),
        (Ranks(2, "simulated"), 0, [{2, 3}]),
        (Ranks(9, "simulated"), 0, [{2, 3, 5}]),
        (Ranks(2, "processes"), 1, [{3}]),
        (Ranks(4, "lab"), 3, [{2}]),
        (Ranks(2, "gpus"), 0, []),
    ],
)
def test_a_rank_has_a_core(ranks, rank, kept, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 3}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.append(set(cores)), raising=False)
    keep_to_cores(ranks.kind, ranks.num, rank)
    assert asked == kept


def test_where_no_process_can_be_kept_nothing_is_said_of_it(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None, raising=False)
    assert ranks_in_words(Ranks(4, "simulated"), "jaxddp")[1] == "4 simulated CPU devices in one process, on 2 core(s)"
    assert ranks_in_words(Ranks(2, "processes"), "jaxddp")[1] == "2 processes of one CPU device on one core"
    assert ranks_in_words(Ranks(2, "simulated"), "torchref") == ("processes", "2 processes of 1 thread(s)")
    monkeypatch.delattr(os, "sched_setaffinity")
    assert num_cores("processes", 2) == 0
    assert ranks_in_words(Ranks(2, "simulated"), "jaxddp")[1] == "2 simulated CPU devices in one process"
    assert ranks_in_words(Ranks(2, "gpus"), "jaxddp") == ("GPUs", "2 GPUs in one process")
