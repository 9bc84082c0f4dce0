import dataclasses

import pytest

from benchmarks import memory
from benchmarks.benchmark import Case
from benchmarks.conftest import options
from benchmarks.memory import ONE_RANK, measure
from benchmarks.ranks import Ranks


@pytest.mark.full
@pytest.mark.parametrize(("target", "shards", "notes"), [("h100:2", 2, []), ("h100:1", 1, [ONE_RANK])])
def test_a_step_is_compiled_and_its_state_is_that_of_the_formula(target, shards, notes):
    (case,) = memory.cases(options(model="tiny", batch_size=4, target=target, strategies=["zero1"]))
    (row,) = measure(case, print)
    assert row["check"] == "ok" and row["notes"] == notes, row
    assert row["formula_bytes"] == memory.SIZES["tiny"].num_params * (4 + 8 / shards)
    assert row["state_bytes"] == row["formula_bytes"] + 4 + 4 + 8  # optax's count, that of the state, and its key
    assert row["compiled_bytes"] == sum(row["compiled"].values()) > row["state_bytes"]


def test_on_gpus_each_strategy_takes_two_steps_in_both_frameworks(monkeypatch):
    for module in ("memory", "ranks"):
        monkeypatch.setattr(f"benchmarks.{module}.num_gpus", lambda: 1)
    made = memory.cases(options(model="tiny", batch_size=2, strategies=["naive"]))
    assert [case.name for case in made] == ["naive", "jaxddp naive on GPUs", "torchref naive on GPUs"]
    setup = dataclasses.replace(made[-1].setup, ranks=Ranks(1, "processes"))  # where torch counts no bytes
    (row,) = measure(Case("here", setup), print)
    assert row["table"] == memory.ALLOCATORS and row["notes"] == [ONE_RANK] and row["strategy"] == "naive"
    assert {row[name] for name in ("after_init_bytes", "peak_bytes", "after_step_bytes")} == {0}
