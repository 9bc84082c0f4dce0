"""Batches that their ranks' processes do not survive: each is a row that says so, and costs no other."""

import io
from collections import Counter

import pytest
from rich.console import Console

from benchmarks.collectives import benchmark as collectives
from benchmarks.collectives.benchmark import Part, Setup, run
from benchmarks.collectives.sizes import KIB
from benchmarks.collectives.turns import Batch, Side, Timed
from benchmarks.ranks import Ranks
from benchmarks.run import Run
from torchref.launch import RankError

NAMES = ("all_reduce", "broadcast", "reduce")
SIZES = (KIB, 16 * KIB, 256 * KIB, 1024 * KIB)
SETUP = Setup((Part("torchref", Ranks(2, "processes")),), NAMES, SIZES, num_rounds=5, budget_s=1.0)
WHY = "rank 1 of 2 failed: killed by signal 9 (SIGKILL)"


@pytest.fixture
def run_dying(tmp_path, monkeypatch):
    """Runs the benchmark on ranks whose processes end at some batches: the run, its jobs, calls timed and checks."""

    def run_with(ends):
        jobs = []

        def run_torch(ranks, fn, job, *, on_message):
            jobs.append([batch.asked_bytes for batch in job.batches])
            timed = []
            for batch in job.batches:
                if ends(batch, len(jobs)) == "before it begins":
                    raise RankError(WHY)
                on_message(0, ("size", batch))
                if ends(batch, len(jobs)):
                    raise RankError(f"{WHY}\n\ndetails of {batch.asked_bytes}")
                seconds = [1e-3 + batch.asked_bytes * 1e-9] * 5
                timed += [Timed(name, *[batch.asked_bytes] * 2, seconds=seconds) for name in batch.names]
            return [Side("cpu", {}, timed)] * 2

        monkeypatch.setattr(Ranks, "run_torch", run_torch)
        monkeypatch.setattr(collectives, "draw", lambda rows, folder: [])
        this = Run(tmp_path, Console(file=io.StringIO(), width=200), "collectives")
        holds = run(this, SETUP)
        calls = [row for row in this.rows if "asked_bytes" in row]
        timed = Counter(row["asked_bytes"] for row in calls if row["check"] == "ok")
        failed = {(row["collective"], row["asked_bytes"]): row["check"] for row in calls if row["check"] != "ok"}
        return holds, this, jobs, timed, failed

    return run_with


def apart(monkeypatch, *sizes):
    """Lets the collectives of some sizes not fit into memory together."""
    together = collectives.fitting

    def fitting(*args):
        batches, left_out = together(*args)
        dealt = [
            [Batch(batch.asked_bytes, (name,)) for name in batch.names] if batch.asked_bytes in sizes else [batch]
            for batch in batches
        ]
        return tuple(batch for some in dealt for batch in some), left_out

    monkeypatch.setattr(collectives, "fitting", fitting)


def test_all_is_well_where_all_survive(run_dying):
    holds, _, jobs, timed, failed = run_dying(lambda batch, index: False)
    assert holds and jobs == [list(SIZES[::-1])] and timed == dict.fromkeys(SIZES, 3) and not failed


def test_one_size_costs_no_other(run_dying, tmp_path):
    holds, _, jobs, timed, failed = run_dying(lambda batch, index: batch.asked_bytes == SIZES[2])
    assert jobs == [list(SIZES[::-1]), [SIZES[3], SIZES[1], SIZES[0]]]
    assert not holds and timed == dict.fromkeys((SIZES[0], SIZES[1], SIZES[3]), 3)
    assert failed == {(name, SIZES[2]): f"FAILED: 256 KiB: {WHY}" for name in NAMES}
    (kept,) = tmp_path.glob("error-*.txt")
    assert "256-kib" in kept.name and f"details of {SIZES[2]}" in kept.read_text()


def test_collectives_that_run_apart_cost_no_smaller_size(run_dying, monkeypatch):
    apart(monkeypatch, SIZES[3])
    holds, _, jobs, timed, failed = run_dying(lambda batch, index: batch.names in (("broadcast",), ("reduce",)))
    assert jobs == [[SIZES[3]]] * 3 + [list(SIZES[2::-1])]
    assert not holds and timed == dict.fromkeys(SIZES[:3], 3) | {SIZES[3]: 1}
    assert set(failed) == {("broadcast", SIZES[3]), ("reduce", SIZES[3])}


@pytest.mark.parametrize("how", [True, "before it begins"])
def test_what_was_found_stays_when_the_rest_is_given_up(how, run_dying, monkeypatch):
    apart(monkeypatch, SIZES[3])
    holds, _, jobs, timed, failed = run_dying(lambda batch, index: how if index > 1 else False)
    assert not holds and timed == {SIZES[3]: 1}
    assert len(failed) == 3 * len(SIZES) - 1
    assert failed["reduce", SIZES[0]].startswith("FAILED: 1 KiB: not tried after: rank 1 of 2 failed")
    assert len(jobs) == (2 if how == "before it begins" else 5)  # two of the largest, and two sizes more


def test_ranks_that_survive_nothing_are_not_started_for_every_size(run_dying):
    holds, this, jobs, timed, _ = run_dying(lambda batch, index: True)
    assert [sizes[0] for sizes in jobs] == list(SIZES[:0:-1]) and not timed and not holds
    assert f"Gloo, 2 ranks: FAILED: {WHY}" in this.console.file.getvalue()
