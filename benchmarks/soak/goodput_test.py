"""The parts of the time, from made-up events."""

import pytest

from benchmarks.soak.goodput import PARTS, account


def at(at_s, kind, **fields):
    return {"at_s": at_s, "kind": kind, **fields}


def parts_of(events):
    parts = account(events)
    assert sum(parts.values()) == pytest.approx(events[-1]["at_s"] - events[0]["at_s"])
    assert tuple(parts) == PARTS
    return {part: seconds for part, seconds in parts.items() if seconds}


def start(at_s):
    """Five seconds until it is started, and five more of which three compile."""
    return [at(at_s, "launched"), at(at_s + 5, "started"), at(at_s + 10, "compiled", seconds=3.0)]


def steps(at_s, *numbers, save_s=0.0):
    return [at(at_s + index + 1, "step", step=number, save_s=save_s) for index, number in enumerate(numbers)]


def test_an_undisturbed_run():
    assert parts_of([*start(0), *steps(10, 1, 2, 3, 4)]) == {"start": 7, "compilation": 3, "useful steps": 4}


def test_a_save_is_not_useful():
    assert parts_of(start(0) + steps(10, 1) + steps(11, 2, save_s=0.25)) == {
        "start": 7, "compilation": 3, "useful steps": 1.75, "saving": 0.25,
    }  # fmt: skip


def test_after_a_kill_steps_since_the_checkpoint_are_repeated():
    before, fault = [*start(0), *steps(10, 1, 2, 3)], [at(15, "noticed"), at(19, "ended")]
    found = parts_of([*before, *fault, *start(20), *steps(30, 2, 3, 4)])
    assert found == {
        "start": 7, "compilation": 6, "useful steps": 4, "repeated steps": 2, "detection": 2, "restart": 4 + 1 + 7,
    }  # fmt: skip


def test_steps_that_go_on_after_it_was_noticed_are_steps():
    """As after SIGTERM, which is noticed while a step is finished and saved."""
    found = parts_of([*start(0), *steps(10, 1), at(11.25, "noticed"), *steps(11.25, 2, save_s=0.5), at(13, "ended")])
    assert found == {
        "start": 7, "compilation": 3, "useful steps": 1.5, "saving": 0.5, "detection": 0.25, "restart": 0.75,
    }  # fmt: skip


def test_a_run_that_hangs_until_the_end_restarts_until_the_end():
    found = parts_of([*start(0), *steps(10, 1), at(12, "noticed"), at(13, "ended"), *start(13), at(100, "over")])
    assert found == {"start": 7, "compilation": 6, "useful steps": 1, "detection": 1, "restart": 1 + 7 + 77}


def test_a_restart_that_fails_is_all_restart():
    failed = [at(12, "launched"), at(15, "started"), at(16, "ended")]
    found = parts_of([*start(0), *steps(10, 1), at(11, "noticed"), at(11, "ended"), *failed, *start(16)])
    assert found == {"start": 7, "compilation": 6, "useful steps": 1, "restart": 5 + 7}
