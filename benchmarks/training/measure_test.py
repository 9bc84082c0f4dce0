import dataclasses
import math

import numpy as np
import pytest

from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import counts, new_run_folder
from benchmarks.training.interleaving import Variant, interleave
from benchmarks.training.measure import (
    Measured,
    SideResult,
    StepMetrics,
    TrainingSetup,
    largest_difference,
    merge_ranks,
)
from benchmarks.training.steps import check

METRICS = [StepMetrics(2.0, 0.5), StepMetrics(1.0, 0.4)]
GOOD = Measured([("all-reduce", 8)], [("all-reduce", 8)], METRICS, METRICS, 1e-6, [0.2, 0.3, 0.4], [0.1, 0.1, 0.3])
SETUP = TrainingSetup("tiny", (), Ranks(2, "simulated"), (), tolerance=1e-3, must_learn=True)


def test_variants_take_turns_and_every_round_starts_with_another():
    seen = []

    def step(label):
        return lambda index: seen.append((index, label)) or StepMetrics(float(index), 1.0)

    times, failed = interleave([Variant(label, step(label)) for label in "abc"], 4, 1)
    assert not failed
    assert [label for _, label in seen] == list("abcbcacababc")
    assert {label: [one.loss for one in metrics] for label, (metrics, _) in times.items()} == dict.fromkeys(
        "abc", [0.0, 1.0, 2.0, 3.0]
    )
    assert all(len(seconds) == 3 for _, seconds in times.values())


def test_what_fails_in_its_first_step_takes_part_in_no_other():
    seen = []

    def fail(index):
        seen.append(index)
        raise OSError("no network")

    variants = [Variant("bad", fail), Variant("good", lambda index: StepMetrics(float(index), 1.0))]
    times, failed = interleave(variants, 3, 1)
    assert failed == {"bad": "OSError: no network"} and seen == [0]
    assert list(times) == ["good"] and len(times["good"][0]) == 3

    def fail_later(index):
        if index:
            raise OSError("too late")
        return METRICS[0]

    with pytest.raises(OSError, match="too late"):
        interleave([Variant("bad", fail_later)], 3, 1)


def test_what_fails_on_another_rank_is_left_out_here_as_well():
    told = iter(["", "OSError: rank 1 has none"])
    variants = [Variant(label, lambda index: METRICS[index]) for label in "ab"]
    times, failed = interleave(variants, 2, 0, agree=lambda said: next(told))
    assert list(times) == ["a"] and failed == {"b": "OSError: rank 1 has none"}


def test_a_step_is_as_slow_as_its_slowest_rank_and_as_wrong_as_its_worst():
    worse = [StepMetrics(2.0, 0.5), StepMetrics(math.nan, 0.4)]
    other = dataclasses.replace(
        GOOD, metrics=worse, max_weight_difference=math.nan, seconds=[0.1, 0.5, 0.4], baseline_seconds=[0.2, 0.0, 0.1]
    )
    sides = [
        SideResult(2, "", "", "", "", {}, {}, {}, {"x": one}, probes={"p": [0.1 * index]})
        for index, one in enumerate((GOOD, other))
    ]
    merged = merge_ranks(sides)
    x = merged.measured["x"]
    assert x.seconds == [0.2, 0.5, 0.4] and x.baseline_seconds == [0.2, 0.1, 0.3]
    assert merged.probes == {"p": [0.1]}
    assert x.metrics[0] == METRICS[0] and math.isnan(x.metrics[1].loss)
    assert math.isnan(x.max_weight_difference)
    assert merge_ranks(sides[:1]).measured["x"] == GOOD


def test_exposed_time_is_paired_by_round():
    assert GOOD.exposed.median_ms == pytest.approx(100)  # the median of 100, 200 and 100
    assert (GOOD.exposed.p10_ms, GOOD.exposed.p90_ms) == pytest.approx((100, 180))
    assert dataclasses.replace(GOOD, baseline_seconds=[]).exposed is None


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, "ok"),
        ({"found": []}, "WRONG: 1 collectives planned, others found"),
        ({"found": [("all-reduce", 4)]}, "WRONG: 1 collectives planned, others found"),
        ({"planned": None, "found": []}, "ok"),
        ({"max_weight_difference": 2e-3}, "WRONG: weights differ by more than 1e-03"),
        ({"max_weight_difference": math.nan}, "WRONG: weights differ by more than 1e-03"),
        ({"metrics": METRICS[::-1], "reference": METRICS[::-1]}, "WRONG: the loss did not fall"),
        ({"metrics": [METRICS[0], StepMetrics(math.nan, 0.4)]}, "WRONG: loss or gradient norm differs by more than 1%"),
        ({"metrics": [METRICS[0], StepMetrics(1.0, 0.8)]}, "WRONG: loss or gradient norm differs by more than 1%"),
    ],
)
def test_a_wrong_result_is_marked(change, found):
    assert check(dataclasses.replace(GOOD, **change), SETUP) == found


def test_without_a_tolerance_losses_and_norms_decide():
    free = dataclasses.replace(SETUP, tolerance=None)
    assert check(dataclasses.replace(GOOD, max_weight_difference=1.0), free) == "ok"
    assert check(dataclasses.replace(GOOD, metrics=[METRICS[0], StepMetrics(1.0, 0.8)]), free).startswith("WRONG")


def test_the_largest_difference_is_over_all_weights():
    ours, theirs = {"a": np.zeros(3), "b": np.array([1.0, 2.0])}, {"a": np.zeros(3), "b": np.array([1.0, 2.5])}
    assert largest_difference(ours, theirs) == 0.5


def test_collectives_in_words():
    assert counts([]) == "none"
    assert counts([("all-reduce", 1), ("all-gather", 1), ("all-reduce", 2)]) == "1 AG, 2 AR"


def test_nothing_is_overwritten(tmp_path):
    assert new_run_folder(str(tmp_path / "new"), "main").is_dir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("{}")
    with pytest.raises(
        ValueError, match=r"out \(=.*old\) must not exist, or be an empty folder: nothing is overwritten"
    ):
        new_run_folder(str(tmp_path / "old"), "main")
