"""What was found of a size stays: one that the ranks' processes do not survive costs no other, nor does Ctrl-C."""

import io
from collections import Counter

import pytest
from rich.console import Console

from benchmarks.collectives import benchmark as collectives
from benchmarks.collectives import part as parts
from benchmarks.collectives.benchmark import run
from benchmarks.collectives.forecast import Forecast
from benchmarks.collectives.interleaving import Batch, Found, Side, Timed
from benchmarks.collectives.part import BackendPart, CollectivesSetup
from benchmarks.collectives.sizes import KIB
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.run import Run, read_rows
from torchref.launch import RankError

NAMES = ("all_reduce", "broadcast", "reduce")
SIZES = (KIB, 16 * KIB, 256 * KIB, 1024 * KIB)
SETUP = CollectivesSetup((BackendPart("torchref", Ranks(2, "processes")),), NAMES, SIZES, num_rounds=5, budget_s=1.0)
WHY = "rank 1 of 2 failed: killed by signal 9 (SIGKILL)"


@pytest.fixture
def run_dying(tmp_path, monkeypatch):
    """Runs the benchmark on ranks whose processes end at some batches: the run, its jobs, calls timed and checks."""

    def run_with(ends):
        jobs = []

        def run_torch(ranks, fn, job, *, on_message):
            jobs.append([batch.asked_bytes for batch in job.batches])
            for batch in job.batches:
                if ends(batch, len(jobs)) == "before it begins":
                    raise RankError(WHY)
                on_message(0, ("size", batch))
                if ends(batch, len(jobs)) == "Ctrl-C":
                    raise KeyboardInterrupt
                if ends(batch, len(jobs)):
                    raise RankError(f"{WHY}\n\ndetails of {batch.asked_bytes}")
                seconds = [1e-3 + batch.asked_bytes * 1e-9] * 5
                timed = [Timed(name, *[batch.asked_bytes] * 2, seconds=seconds) for name in batch.names]
                on_message(0, ("found", Found(batch, Side("cpu", {}), [timed] * 2)))
            return [None] * 2

        monkeypatch.setattr(Ranks, "run_torch", run_torch)
        this = Run(tmp_path, Console(file=io.StringIO(), width=200), "collectives")
        holds = run(this, SETUP)
        calls = [row for row in this.rows if "asked_bytes" in row]
        timed = Counter(row["asked_bytes"] for row in calls if row["check"] == "ok")
        failed = {(row["collective"], row["asked_bytes"]): row["check"] for row in calls if row["check"] != "ok"}
        return holds, this, jobs, timed, failed

    return run_with


def apart(monkeypatch, *sizes):
    """Lets the collectives of some sizes not fit into memory together."""
    together = parts.fitting

    def fitting(*args):
        batches, left_out = together(*args)
        dealt = [
            [Batch(batch.asked_bytes, (name,)) for name in batch.names] if batch.asked_bytes in sizes else [batch]
            for batch in batches
        ]
        return tuple(batch for some in dealt for batch in some), left_out

    monkeypatch.setattr(parts, "fitting", fitting)


def test_all_is_well_where_all_survive(run_dying):
    holds, _, jobs, timed, failed = run_dying(lambda batch, index: False)
    assert holds and jobs == [list(SIZES[::-1])] and timed == dict.fromkeys(SIZES, 3) and not failed


def test_one_size_costs_no_other(run_dying, tmp_path):
    holds, _, jobs, timed, failed = run_dying(lambda batch, index: batch.asked_bytes == SIZES[2])
    assert jobs == [list(SIZES[::-1]), [SIZES[1], SIZES[0]]]
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


def test_what_was_done_of_a_stopped_run_stays_and_the_rest_is_measured(run_dying, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_dying(lambda batch, index: "Ctrl-C" if batch.asked_bytes == SIZES[1] else False)
    before, broken = read_rows(tmp_path / "metrics.jsonl")
    assert Counter((row["asked_bytes"], row["check"]) for row in before) == {(SIZES[3], "ok"): 3, (SIZES[2], "ok"): 3}
    left = [Batch(size, NAMES) for size in SIZES[1::-1]]
    assert list(collectives._forecast(SETUP, SETUP.parts, before)) == [("Gloo, 2 ranks", batch) for batch in left]

    holds, this, jobs, timed, failed = run_dying(lambda batch, index: False)
    assert jobs == [[SIZES[1], SIZES[0]]] and "Gloo, 2 ranks: was measured before, in part" in printed(this)
    assert holds and timed == dict.fromkeys(SIZES, 3) and not failed and not broken
    assert [row for row in this.rows if row in before] == before  # when it was measured too
    assert fits(this) == dict.fromkeys(NAMES, len(SIZES))


def test_a_run_that_is_stopped_again_and_again_ends_like_any_other(run_dying, tmp_path):
    for size in SIZES[:0:-1]:
        with pytest.raises(KeyboardInterrupt):  # each time when one size is done
            run_dying(lambda batch, index, size=size: "Ctrl-C" if batch.asked_bytes < size else False)
    _, in_steps, jobs, timed, _ = run_dying(lambda batch, index: False)
    assert jobs == [[SIZES[0]]] and timed == dict.fromkeys(SIZES, 3)
    (tmp_path / "metrics.jsonl").unlink()
    _, at_once, _, _, _ = run_dying(lambda batch, index: False)
    assert [plain(row) for row in in_steps.rows] == [plain(row) for row in at_once.rows]


def test_collectives_that_run_apart_are_kept_one_by_one(run_dying, monkeypatch):
    apart(monkeypatch, SIZES[3])
    with pytest.raises(KeyboardInterrupt):
        run_dying(lambda batch, index: "Ctrl-C" if batch.names == ("broadcast",) else False)
    monkeypatch.undo()  # there is more memory now
    holds, this, jobs, timed, _ = run_dying(lambda batch, index: False)
    assert holds and timed == dict.fromkeys(SIZES, 3) and jobs == [list(SIZES[::-1])]


@pytest.mark.parametrize("first", [SIZES[2:3], SIZES])
def test_what_failed_is_measured_when_the_run_goes_on(first, run_dying):
    holds, _, _, timed, _ = run_dying(lambda batch, index: batch.asked_bytes in first)
    assert not holds and set(timed) == set(SIZES) - set(first)
    holds, this, jobs, timed, failed = run_dying(lambda batch, index: False)
    assert holds and jobs == [list(first[::-1])] and timed == dict.fromkeys(SIZES, 3) and not failed
    assert fits(this) == dict.fromkeys(NAMES, len(SIZES)) and len(this.rows) == len(NAMES) * (len(SIZES) + 1)


def test_what_was_measured_elsewhere_stays_where_it_cannot_be(run_dying):
    _, this, _, timed, _ = run_dying(lambda batch, index: False)
    parts.measure_part(this, SETUP, SETUP.parts[0]._replace(why_not="no GPU"), Forecast({}))
    assert Counter(row["asked_bytes"] for row in this.rows if "median_ms" in row) == timed and fits(this)


def printed(this):
    return this.console.file.getvalue()


def fits(this):
    return {row["collective"]: row["num_sizes"] for row in this.rows if "num_sizes" in row}


def plain(row):
    """Without what differs from run to run."""
    return {key: value for key, value in row.items() if key not in ("measured_at", "stolen_share")}
