import numpy as np
import pytest

from benchmarks.timing import Attempts, Ratio, compare, interleave


def rounds_of(num_rounds):
    seen = []
    steps = {label: (lambda index, label=label: seen.append(label) or index) for label in "abc"}
    kept, seconds = interleave(steps, num_rounds, 1, attempt=Attempts(str), after=lambda label, result: 10 * result)
    assert kept == dict.fromkeys("abc", [10 * index for index in range(num_rounds)])
    assert all(len(times) == num_rounds - 1 and min(times) > 0 for times in seconds.values())
    return ["".join(seen[first : first + 3]) for first in range(0, len(seen), 3)]


def test_steps_take_turns_and_follow_one_another_in_every_order():
    rounds = rounds_of(30)
    assert {"".join(sorted(one)) for one in rounds} == {"abc"} and len(set(rounds)) == 6
    assert rounds == rounds_of(30)  # ranks draw the same


def test_what_is_done_before_and_after_a_step_is_not_timed():
    seen = []
    interleave(
        {"a": lambda index: seen.append("step")}, 1, 0, attempt=Attempts(str),
        before=lambda label: seen.append(f"before {label}"), after=lambda label, result: seen.append("after"),
        on_round=lambda done: seen.append(done),
    )  # fmt: skip
    assert seen == ["before a", "step", "after", 1]


def test_what_fails_in_its_first_step_takes_part_in_no_other():
    def fail(index):
        raise OSError("no network\nand more")

    attempt = Attempts(str)
    kept, _ = interleave({"bad": fail, "good": lambda index: index}, 3, 1, attempt=attempt)
    assert attempt.failed == {"bad": "OSError: no network"} and kept == {"good": [0, 1, 2]}

    def fail_later(index):
        if index:
            raise OSError("too late")

    with pytest.raises(OSError, match="too late"):
        interleave({"bad": fail_later}, 3, 1, attempt=Attempts(str))


def test_what_fails_on_another_rank_is_left_out_here_as_well():
    told = iter(["", "OSError: rank 1 has none"])
    attempt = Attempts(lambda said: next(told))
    kept, _ = interleave({label: lambda index: index for label in "ab"}, 2, 0, attempt=attempt)
    (failed,) = {*"ab"} - {*kept}
    assert [*kept.values()] == [[0, 1]] and attempt.failed == {failed: "OSError: rank 1 has none"}


def test_what_slows_both_for_some_rounds_cancels_only_where_they_took_turns():
    rng = np.random.default_rng(0)
    theirs = rng.normal(1.0, 0.01, 20)
    theirs[:6] *= 3
    ours = 1.1 * theirs
    paired, apart = (compare(ours, theirs, paired=paired) for paired in (True, False))
    assert paired.ratio == pytest.approx(1.1) and paired.high - paired.low < 1e-6
    assert apart.high - apart.low > 0.01


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Ratio(1.00, 0.98, 1.02), "ok"),
        (Ratio(1.04, 1.01, 1.07), "ok"),
        (Ratio(1.10, 1.06, 1.14), "MISSED"),
        (Ratio(1.06, 1.02, 1.10), "not judged: limit in interval"),
        (Ratio(1.00, 0.80, 1.20), "not judged: interval too wide"),
    ],
)
def test_a_gate_holds_by_its_interval(found, verdict):
    assert found.verdict(1.05) == verdict
