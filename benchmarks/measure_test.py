import dataclasses
import math

import numpy as np
import pytest

from benchmarks.gates import compare
from benchmarks.measure import Measured, StepMetrics, Variant, interleave, largest_difference
from benchmarks.results import check, counts, new_run_folder

METRICS = [StepMetrics(2.0, 0.5), StepMetrics(1.0, 0.4)]
GOOD = Measured([("all-reduce", 8)], [("all-reduce", 8)], METRICS, METRICS, 1e-6, [0.2, 0.3, 0.4], [0.1, 0.1, 0.3])


def test_variants_take_turns_and_every_round_starts_with_another():
    seen = []

    def step(label):
        return lambda index: seen.append((index, label)) or StepMetrics(float(index), 1.0)

    times = interleave([Variant(label, step(label)) for label in "abc"], 4, 1)
    assert [label for _, label in seen] == list("abcbcacababc")
    assert {label: [one.loss for one in metrics] for label, (metrics, _) in times.items()} == dict.fromkeys(
        "abc", [0.0, 1.0, 2.0, 3.0]
    )
    assert all(len(seconds) == 3 for _, seconds in times.values())


def test_exposed_time_is_paired_by_round():
    assert GOOD.exposed_ms == pytest.approx(100)  # the median of 100, 200 and 100
    assert dataclasses.replace(GOOD, baseline_seconds=[]).exposed_ms is None


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, "ok"),
        ({"found": []}, "WRONG: 1 collectives planned, others found"),
        ({"found": [("all-reduce", 4)]}, "WRONG: 1 collectives planned, others found"),
        ({"max_weight_difference": 2e-3}, "WRONG: weights differ by more than 1e-03"),
        ({"max_weight_difference": math.nan}, "WRONG: weights differ by more than 1e-03"),
        ({"metrics": METRICS[::-1], "reference": METRICS[::-1]}, "WRONG: the loss did not fall"),
        ({"metrics": [METRICS[0], StepMetrics(math.nan, 0.4)]}, "WRONG: loss or gradient norm differs by more than 1%"),
        ({"metrics": [METRICS[0], StepMetrics(1.0, 0.8)]}, "WRONG: loss or gradient norm differs by more than 1%"),
    ],
)
def test_a_wrong_result_is_marked(change, found):
    assert check(dataclasses.replace(GOOD, **change), 1e-3) == found


def test_without_a_tolerance_losses_and_norms_decide():
    assert check(dataclasses.replace(GOOD, max_weight_difference=1.0), None) == "ok"
    assert check(dataclasses.replace(GOOD, metrics=[METRICS[0], StepMetrics(1.0, 0.8)]), None).startswith("WRONG")


def test_a_gate_holds_if_the_lower_end_of_its_interval_does():
    rng = np.random.default_rng(1)
    theirs = list(1 + 0.02 * rng.random(40))
    slower = compare("slower", [1.2 * time for time in theirs], theirs, 1.05)
    assert slower.ratio == pytest.approx(1.2)
    assert 1.15 < slower.low <= slower.ratio <= slower.high < 1.25
    assert not slower.holds
    noisy = compare("noisy", list(1.03 + 0.4 * (rng.random(40) - 0.5)), list(1 + 0.4 * (rng.random(40) - 0.5)), 1.05)
    assert noisy.low < 1.05 < noisy.high
    assert noisy.holds
    assert compare("same", theirs, theirs, 1.0).holds


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
