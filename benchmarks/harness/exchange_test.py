"""What is exchanged between hosts is the same at the other end, and is data alone."""

import json
import math

import numpy as np
import pytest

from benchmarks.collectives.interleaving import Batch, Timed
from benchmarks.harness.exchange import dumps, find, gather, loads
from benchmarks.harness.ranks import Ranks
from benchmarks.training.measure import Measured, StepMetrics, StrategySpec, TrainingSetup
from torchref.launch import shared_pool

BATCHES = ({"tokens": np.arange(6, dtype=np.int32).reshape(2, 3)},)
SETUP = TrainingSetup("byte", (StrategySpec("flat", 4.0),), Ranks(2, "processes", (), (1, 1), "n0"), BATCHES)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "a\n", True],
        {"a": (1, (2,)), 3: {}},
        Batch(8, ("all_reduce",)),
        Timed("all_reduce", 8, planned=[("all-reduce", 8)], seconds=[0.1]),
        Measured(None, [("all-reduce", 4)], [StepMetrics(math.inf, 1e-300)], [], 0.1, [0.2]),
        Ranks(4, "gpus", (), (2, 2), "10.0.0.1", True),
    ],
)
def test_a_value_comes_back_as_it_was(value):
    written = dumps(value)
    assert loads(written) == value and type(loads(written)) is type(value) and "\n" not in written


def test_arrays_and_what_holds_them_come_back():
    found = loads(dumps(SETUP))
    assert (found.strategies, found.ranks) == (SETUP.strategies, SETUP.ranks)
    tokens = found.batches[0]["tokens"]
    assert tokens.dtype == np.int32 and np.array_equal(tokens, BATCHES[0]["tokens"])
    assert loads(dumps(np.float32(0.1))) == float(np.float32(0.1))


@pytest.mark.parametrize(
    "name", ["os:system", "benchmarks.harness.ranks:os", "benchmarks.harness.ranks:none", "subprocess:Popen", "x"]
)
def test_nothing_else_is_found_by_its_name(name):
    with pytest.raises(ValueError, match="must be that of a class or function of"):
        find(name)
    with pytest.raises(ValueError):
        loads(json.dumps({"of": name, "fields": ["true"]}))


def test_functions_and_objects_are_no_data():
    with pytest.raises(ValueError, match="must be plain data"):
        loads(json.dumps({"of": "benchmarks.harness.exchange:find", "fields": ["os:system"]}))
    with pytest.raises(ValueError, match="must be plain data"):
        dumps(object())


def ranks_value():
    import torch.distributed as dist

    return gather(("x" * dist.get_rank(), dist.get_rank()))


def test_ranks_gather_values_of_different_lengths():
    assert shared_pool().run(ranks_value, num_ranks=3) == [[("", 0), ("x", 1), ("xx", 2)]] * 3
