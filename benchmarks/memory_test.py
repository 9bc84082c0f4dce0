import pytest

from benchmarks import memory
from benchmarks.conftest import options
from benchmarks.memory import ONE_RANK, measure


@pytest.mark.full
def test_a_step_is_compiled_and_its_state_is_that_of_the_formula():
    (case,) = memory.cases(options(model="tiny", batch_size=4, target="h100:2", strategies=["zero1"]))
    (row,) = measure(case, print)
    assert row["check"] == "ok", row
    assert row["formula_bytes"] == memory.SIZES["tiny"].num_params * (4 + 8 / 2)
    assert row["state_bytes"] == row["formula_bytes"] + 4 + 4 + 8  # optax's count, that of the state, and its key
    assert row["compiled_bytes"] == sum(row["compiled"].values()) > row["state_bytes"]


def test_one_device_shards_nothing_and_it_is_said(monkeypatch):
    monkeypatch.setattr(memory, "compiled_row", lambda setup: {"check": "ok"})
    for target, notes in (("h100:1", [ONE_RANK]), ("h100:2", [])):
        (case,) = memory.cases(options(target=target, strategies=["zero1"]))
        assert [row["notes"] for row in measure(case, print)] == [notes]


def test_on_gpus_every_strategy_runs_in_processes_of_its_own(monkeypatch):
    monkeypatch.setattr(memory, "num_gpus", lambda: 1)
    cases = memory.cases(options(quick=True))
    assert [case.name for case in cases[4:]] == [
        f"{framework} {name} on GPUs" for framework in ("jaxddp", "torchref") for name in memory.OF_EACH_STAGE
    ]
    assert {(case.setup.num_ranks, case.setup.batch_size) for case in cases[4:]} == {(1, 16)}
