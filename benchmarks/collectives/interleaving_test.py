"""Collectives take turns, as often as there is time for, and every result is checked."""

import pytest

from benchmarks.collectives import interleaving
from benchmarks.collectives.interleaving import MAX_ROUNDS, MIN_ROUNDS, Batch, Call, RanksJob, Side, Timed


class Calls:
    """Makes calls that say what is done, in the order in which it is."""

    def __init__(self, wrong_from=10**9, fails=()):
        self.done, self.ran, self.wrong_from, self.fails = [], 0, wrong_from, fails

    def ready(self, batch):
        self.done.append(batch.asked_bytes)

        def make(name):
            if name in self.fails:
                raise OSError("no network")
            timed = Timed(name, batch.asked_bytes)
            call = Call(lambda: self.done.append("prepare"), lambda _: self.run(name), self.num_wrong, timed)
            call.try_out()
            return call

        return make

    def run(self, name):
        self.done.append(name)
        self.ran += 1
        return self.ran

    def num_wrong(self, result):
        return 3 if result >= self.wrong_from else 0


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """Lets a process take turns that has no others to agree with."""
    said = []
    monkeypatch.setattr(interleaving.dist, "barrier", lambda: None)
    monkeypatch.setattr(interleaving, "gather", lambda value: [value])
    monkeypatch.setattr(interleaving, "agree_over_ranks", lambda said: said)
    monkeypatch.setattr(interleaving, "report", said.append)
    return said


@pytest.fixture
def measure(one_rank):
    """Measures with nothing to wait for, and gives what was found of all sizes."""

    def measured(job, ready):
        one_rank.clear()
        interleaving.measure(job, Side("cpu", {}), ready, lambda value: None)
        return [timed for kind, found, *_ in one_rank if kind == "found" for timed in found.timed[0]]

    return measured


def test_rounds_begin_with_another_collective_each_time(measure):
    calls = Calls()
    batches = (Batch(8, ("a", "b", "c")), Batch(4, ("a",)))
    timed = measure(RanksJob(batches, 2, 1.0), calls.ready)
    assert calls.done[0] == 8
    names = [one for one in calls.done if one != "prepare"]
    assert names[1:13] == [*"abc", *"abc", *"abc", *"bca"] and names[13:] == [4, *"aaaa"]
    assert calls.done[1:].count("prepare") == len(names) - 2  # before every call
    assert [(one.name, one.asked_bytes, len(one.seconds)) for one in timed] == [
        ("a", 8, 2), ("b", 8, 2), ("c", 8, 2), ("a", 4, 2),
    ]  # fmt: skip


def test_a_size_is_told_before_the_next_begins(one_rank, measure):
    small, calls = Batch(4, ("a",)), Calls()

    def ready(batch):
        if batch == small:
            raise RuntimeError("killed")
        return calls.ready(batch)

    with pytest.raises(RuntimeError, match="killed"):
        measure(RanksJob((Batch(8, ("a", "b")), small), 2, 1.0), ready)
    (begun, large), (told, found), then = one_rank
    assert (begun, told, then) == ("size", "found", ("size", small))
    assert found.batch == large and found.side == Side("cpu", {})
    assert [[(one.name, len(one.seconds)) for one in timed] for timed in found.timed] == [[("a", 2), ("b", 2)]]


def test_a_size_that_takes_long_says_how_far_it_is(one_rank, measure, monkeypatch):
    job = RanksJob((Batch(8, ("a", "b")),), 2, 1.0)
    measure(job, Calls().ready)
    assert [kind for kind, *_ in one_rank] == ["size", "found"]  # what is timed is left alone
    monkeypatch.setattr(interleaving, "REPORT_EVERY_S", 0.0)
    measure(job, Calls().ready)
    # After each call: two that try out, two that say what a round takes, and those of two rounds.
    assert one_rank[1:-1] == [*[("rounds", 0, 0)] * 4, *[("rounds", 0, 2)] * 2, *[("rounds", 1, 2)] * 2]


def test_every_result_is_checked(measure):
    job = RanksJob((Batch(8, ("a",)),), 5, 1.0)
    right, always, at_last = (measure(job, Calls(wrong_from=ran).ready)[0] for ran in (8, 1, 7))
    # One call to try it out, one that says how long a round takes, and five rounds.
    assert (right.wrong, always.wrong, at_last.wrong) == (0, 7 * 3, 3)


@pytest.mark.parametrize(("budget_s", "num_rounds"), [(0.0, MIN_ROUNDS), (0.25, 25), (60.0, MAX_ROUNDS)])
def test_there_are_as_many_rounds_as_there_is_time_for(budget_s, num_rounds, measure, monkeypatch):
    monkeypatch.setattr(interleaving, "gather", lambda value: [0.01 if isinstance(value, float) else value])
    (timed,) = measure(RanksJob((Batch(8, ("a",)),), None, budget_s), Calls().ready)
    assert len(timed.seconds) == num_rounds


def test_what_cannot_be_called_is_left_out_and_says_why(measure):
    calls = Calls(fails=("b", "c"))
    timed = measure(RanksJob((Batch(8, ("a", "b")), Batch(4, ("c",))), 5, 1.0), calls.ready)
    assert [(one.name, one.asked_bytes, one.failed) for one in timed] == [
        ("a", 8, ""), ("b", 8, "OSError: no network"), ("c", 4, "OSError: no network"),
    ]  # fmt: skip
    assert len(timed[0].seconds) == 5 and timed[1].seconds == []


def test_small_calls_are_timed_in_a_row_as_well(measure):
    calls = Calls()
    batches = (Batch(interleaving.MOST_IN_A_ROW_BYTES + 4, ("a",)), Batch(8, ("a",)))
    large, small = measure(RanksJob(batches, 1, 1.0, in_a_row=7), calls.ready)
    assert large.in_a_row == [] and len(small.in_a_row) == MIN_ROUNDS
    assert calls.done[calls.done.index(8) :].count("a") == 1 + 1 + 1 + 7 * (1 + MIN_ROUNDS)
