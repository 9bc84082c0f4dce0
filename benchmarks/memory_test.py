import pytest

from benchmarks import memory
from benchmarks.conftest import options
from benchmarks.memory import measure
from jaxddp.instruments.memory import DeviceBytes


@pytest.mark.full
@pytest.mark.parametrize(("target", "shards"), [("h100:2", 2), ("h100:1", 1)])
def test_a_step_is_compiled_and_its_state_is_that_of_the_formula(target, shards):
    (case,) = memory.cases(options(model="tiny", batch_size=4, target=target, strategies=["zero1"]))
    (row,) = measure(case, print)
    assert row["check"] == "ok", row
    assert row["formula_bytes"] == memory.SIZES["tiny"].num_params * (4 + 8 / shards)
    assert row["state_bytes"] == row["formula_bytes"] + 4 + 4 + 8  # optax's count, that of the state, and its key
    assert row["compiled_bytes"] == sum(row[name] for name in DeviceBytes._fields) > row["state_bytes"]
