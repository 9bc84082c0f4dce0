"""Wrong arguments of public functions: one line, which names the argument, and never a traceback of something else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.arguments import check_integer
from jaxddp.checkpoint.checkpoints import Checkpoints

PARAMS, BATCH = {"w": jnp.ones((3, 1))}, {"x": np.ones((8, 3), "f")}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def trainer(**changed):
    usual = {
        "loss_fn": loss_fn, "optimizer": optax.sgd(0.1), "strategy": jaxddp.bucketed(), "mesh": jaxddp.data_mesh(2)
    }  # fmt: skip
    return jaxddp.Trainer(**usual | changed)


def of_trainer(option):
    return lambda value: trainer(**{option: value})


def of_state(method, *args):
    return lambda value: getattr(trainer(), method)(value, *args)


OPTIONS = (
    "optimizer strategy mesh num_microbatches max_grad_norm param_specs grad_dtype compute_dtype nonfinite state_sync"
).split()
# Functions of one argument.
FUNCTIONS = {name: of_trainer(name) for name in OPTIONS} | {
    "params": lambda value: trainer().init(value),
    **{f"{one} of a state": of_state(one, BATCH) for one in ("step", "evaluate", "compile", "plan", "planned")},
    **{f"{one} of a state": of_state(one) for one in ("params", "layout", "programs")},
    "check_replicas of a state": lambda value: jaxddp.check_replicas(trainer(), value),
    "step of a batch": lambda value: trainer().step(trainer().init(PARAMS), value),
    "a leaf of a batch": lambda value: trainer().step(trainer().init(PARAMS), {"x": value}),
    "bucketed": jaxddp.bucketed,
    "hook": lambda value: jaxddp.bucketed(hook=value),
    "min_shard_elements": lambda value: jaxddp.zero3(min_shard_elements=value),
    "make_strategy": jaxddp.make_strategy,
    "max_grad_norm": lambda value: jaxddp.shard_optimizer(optax.sgd(0.1), "data", max_grad_norm=value),
    "shard_optimizer": lambda value: jaxddp.shard_optimizer(value, "data"),
    "axis": lambda value: jaxddp.shard_optimizer(optax.sgd(0.1), value),
    "plan_gradients": lambda value: jaxddp.plan_gradients(value, jax.grad(loss_fn), PARAMS, BATCH),
    "value_and_grad": lambda value: jaxddp.value_and_grad(loss_fn, value),
    "jit": lambda value: jaxddp.jit(loss_fn, value),
    "compile_options": lambda value: jaxddp.compile_options(value, "gpu"),
    "read_schedule": jaxddp.read_schedule,
    "Network": jaxddp.Network,
    "measured": jaxddp.network.measured,
    "plan of a batch": lambda value: trainer().plan(trainer().init(PARAMS), value),
    "a mesh of a target": jaxddp.targets.target_of,
    "timeout_s": lambda value: jaxddp.start_process("127.0.0.1:1", 1, 0, timeout_s=value),
    "process_id": lambda value: jaxddp.start_process("127.0.0.1:1", 1, value),
    "state of a save": lambda value: Checkpoints("here").save(trainer(), value),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_argument_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^[^\n]{10,400}$") as raised:
        FUNCTIONS[name](object())
    assert type(raised.value).__module__.startswith(("builtins", "jaxddp"))


def test_a_negative_or_infinite_weight_is_found_as_not_finite():
    def weighted(params, batch):
        return jaxddp.Weighted(loss_fn(params, batch), jnp.sum(batch["weight"]))

    batch = BATCH | {"weight": np.repeat(np.float32([9, -1]), 4)}  # of rank 1 negative, of both positive
    one = trainer(loss_fn=weighted, nonfinite="skip")
    state, metrics = one.step(one.init(PARAMS), batch)
    assert np.isnan(metrics["loss"])
    np.testing.assert_array_equal(one.params(state)["w"], PARAMS["w"])
    for weight in (-1.0, np.inf):
        constant = trainer(loss_fn=lambda params, batch, weight=weight: jaxddp.Weighted(loss_fn(params, batch), weight))
        assert np.isnan(constant.step(constant.init(PARAMS), BATCH)[1]["loss"])
        ones = BATCH["x"][:, 0]
        measured = one.evaluate(state, (ones, weight * ones), lambda _, batch: {"x": jaxddp.Weighted(*batch)})
        assert np.isnan(measured["x"])


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3, np.uint8), jnp.int32(3)])
def test_integers_of_any_library_become_pythons(value):
    found = check_integer("size", value)
    assert found == 3 and type(found) is int
    assert type(trainer(num_microbatches=value).num_microbatches) is int
