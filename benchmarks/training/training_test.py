"""A training run from end to end, on a tiny model: both frameworks in rounds, a wrong peer, and a step kept silent.

Functions that ranks run stand at the top level: other processes import them by name.
"""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.ranks import Ranks
from benchmarks.training import rank, torch_side
from benchmarks.training.rank import PATH_TOLERANCE, check, distance, exposed, train
from benchmarks.training.setup import Run, StrategySpec, TrainingSetup
from jaxddp.sizes import SIZES
from torchref.launch import shared_pool

_RNG = np.random.default_rng(0)
# The same batch in every round, so that the loss must fall.
BATCHES = ({name: _RNG.integers(0, 64, (8, 16), np.int32) for name in ("tokens", "targets")},) * 5
CAP_MB, NUM_BYTES = 0.01, SIZES["tiny"].num_params * 4  # in several buckets
NAIVE, BUCKETED = StrategySpec("naive"), StrategySpec("bucketed", CAP_MB)
DDP, FSDP2 = StrategySpec("DistributedDataParallel", CAP_MB), StrategySpec("fully_shard")
# Adam's first steps have full size whatever the gradient, here 1e-2; rounding was seen to move weights by 4e-7.
TINY = TrainingSetup(
    "tiny", {"jaxddp": (NAIVE, StrategySpec("jit")), "torchref": (BUCKETED, DDP)}, Ranks(2, "processes"), BATCHES, 1,
    tolerance=1e-4, must_learn=True, learning_rate=1e-2,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return TINY.ranks.run(train, TINY, in_jax=True, say=print)


def test_frameworks_take_turns_in_the_same_rounds_and_every_row_is_right(rows):
    assert [(row["framework"], row["strategy"]) for row in rows] == [
        *(("jaxddp", name) for name in ("naive", "jit")),
        *(("torchref", name) for name in ("bucketed", "DistributedDataParallel")),
    ]
    for row in rows:
        assert row["check"] == "ok" and row["frameworks_in_rounds"] == ["jaxddp", "torchref"]
        assert (row["num_ranks"], row["params_bytes"], row["global_batch"], row["microbatch"]) == (2, NUM_BYTES, 8, 4)
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] and len(row["rounds_ms"]) == 4
        assert row["loss"] < row["first_loss"] and row["max_weight_difference"] < 1e-5
        assert row["path_difference"] < 1e-4
        differences = np.subtract(row["rounds_ms"], row["baseline_rounds_ms"])
        assert row["exposed_ms"] == pytest.approx(np.median(differences), abs=1e-3)  # of rounds rounded to 1e-4
        is_ours = row["strategy"] in ("naive", "bucketed")
        assert (row["planned"] is not None) == is_ours
        assert not is_ours or sum(size for _, size in row["compiled"]) == NUM_BYTES


def silent_and_failing(ranks, setup):
    """Keeps one peer from communicating, and another from starting; runs on each rank."""

    peer = torch_side.TorchSide._peer

    def broken(side, spec, module, *, sends):
        if spec.name == "fully_shard":
            raise NotImplementedError("no such device\nand more")
        return peer(side, spec, module, sends=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_side.TorchSide, "_peer", broken)
        patch.setattr(torch_side, "silent", lambda: 1 / 0)
        return train(ranks, setup)


def test_what_is_wrong_is_marked_and_what_fails_is_a_row():
    specs = {"torchref": (BUCKETED, DDP, FSDP2)}
    setup = dataclasses.replace(TINY, strategies=specs)
    (ours, ddp, fsdp), _ = shared_pool().run(silent_and_failing, setup.ranks, setup, num_ranks=2)
    assert ours["check"] == "FAILED: without communication: ZeroDivisionError: division by zero"
    assert "exposed_ms" not in ours
    assert ddp["check"] == "WRONG: weights differ by more than 1e-04" and ddp["path_difference"] > PATH_TOLERANCE
    assert fsdp["check"] == "FAILED: NotImplementedError: no such device"


GOOD = {
    "planned": [("all-reduce", 8)], "compiled": [["all-reduce", 8]], "max_weight_difference": 1e-6,
    "path_difference": 1e-4, "max_metric_difference": 1e-6, "first_loss": 2.0, "loss": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, "ok"),
        ({"compiled": [("all-reduce", 4)]}, "WRONG: 1 collectives planned, others found"),
        ({"planned": None, "compiled": None}, "ok"),
        ({"max_weight_difference": 2e-4}, "WRONG: weights differ by more than 1e-04"),
        ({"max_weight_difference": math.nan}, "WRONG: weights differ by more than 1e-04"),
        ({"path_difference": 1.0}, "WRONG: weights end elsewhere by more than 50% of the way from the start"),
        ({"max_metric_difference": math.inf}, "WRONG: loss or gradient norm differs by more than 1%"),
        ({"loss": 2.0}, "WRONG: the loss did not fall"),
    ],
)
def test_a_wrong_result_is_told(change, found):
    assert check(GOOD | change, TINY) == found


def test_a_weight_that_is_not_a_number_is_the_worst(monkeypatch):
    monkeypatch.setattr(rank, "gather", lambda value: [value])
    weights = {"a": np.array([0.5]), "b": np.array([math.nan])}
    start, right = ({name: np.array([value]) for name in weights} for value in (1.0, 0.0))
    metrics = [(1.0, 1.0)]
    found = rank._trained(Run(lambda index: metrics[index], lambda: weights), metrics, (start, metrics, right), False)
    assert math.isnan(found["max_weight_difference"])


def test_a_norm_that_is_not_a_number_is_as_far_as_can_be():
    assert distance((1.0, 1.0), (1.0, 2.0)) == 1.0 and distance((1.0, 1.0), (1.0, math.nan)) == math.inf
    assert exposed([0.2, 0.3, 0.4], [0.1, 0.1, 0.3])["exposed_ms"] == pytest.approx(100)  # of 100, 200 and 100
