import argparse

import pytest

from benchmarks import memory
from benchmarks.__main__ import make_options
from benchmarks.memory import MOMENTS, ONE_RANK, measure


def options(**given):
    return argparse.Namespace(**dict.fromkeys(make_options()) | given)


def test_a_step_is_compiled_and_its_state_is_that_of_the_formula():
    (case,) = memory.cases(options(model="tiny", batch_size=4, target="h100:2", strategies=["zero1"]))
    rows = list(measure(case, print))
    assert [row["moment"] for row in rows] == list(MOMENTS.values())
    assert [row["check"] for row in rows] == ["ok"] * 3, rows
    params = memory.SIZES["tiny"].num_params * 4
    assert rows[0]["formula_bytes"] == rows[0]["compiled_bytes"] == params + params + memory.SCALAR_BYTES  # 4 + 8/2
    for row in rows[1:]:
        assert row["compiled_bytes"] == sum(row["compiled"].values()) > rows[0]["compiled_bytes"]


def test_one_device_shards_nothing_and_it_is_said(monkeypatch):
    monkeypatch.setattr(memory, "compiled_rows", lambda setup: iter([{"check": "ok"}]))
    for target, notes in (("h100:1", [ONE_RANK]), ("h100:2", [])):
        (case,) = memory.cases(options(target=target, strategies=["zero1"]))
        assert [row["notes"] for row in measure(case, print)] == [notes]


def test_on_gpus_every_strategy_runs_in_processes_of_its_own(monkeypatch):
    monkeypatch.setattr(memory, "num_gpus", lambda: 1)
    monkeypatch.setattr("benchmarks.ranks.num_gpus", lambda: 1)
    cases = memory.cases(options(quick=True))
    assert [case.name for case in cases[4:]] == [
        f"{framework} {name} on GPUs" for framework in ("jaxddp", "torchref") for name in memory.OF_EACH_STAGE
    ]
    assert {(case.setup.num_ranks, case.setup.batch_size) for case in cases[4:]} == {(1, 16)}


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="unknown model 'gpt': one of tiny"):
        memory.cases(options(model="gpt"))
