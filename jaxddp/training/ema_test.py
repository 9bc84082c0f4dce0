"""The moving average of parameters: equal to optax's on one device, sharded, skipped, saved and restored."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint import Checkpoints
from jaxddp.instruments.memory import held_bytes, step_memory

DECAY = 0.9
STRATEGIES = {
    "bucketed": jaxddp.bucketed(),
    "zero1": jaxddp.zero1(),
    "zero2 by leaves": jaxddp.zero2(shard="leaves"),
    "zero3": jaxddp.zero3(min_shard_elements=10),
}


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def loss_fn(params, batch):
    x = jnp.tanh(batch["x"] @ params["a"]) * params["scale"]
    return jnp.mean((x @ params["b"]) ** 2)


def inputs():
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(6, 7)), "b": rng.normal(size=(7, 3)), "scale": np.full(7, 2.0)}
    return params, {"x": rng.normal(size=(16, 6))}


def trainer_of(strategy, num_ranks=4, **options):
    options = {"ema_decay": DECAY, "trainable": lambda name: name != "scale"} | options
    return jaxddp.Trainer(loss_fn, optax.adam(0.1), strategy, jaxddp.data_mesh(num_ranks), **options)


def averages(params, batch, count):
    """``optax.incremental_update`` after each step of one device."""
    frozen, params = {"scale": params["scale"]}, {name: params[name] for name in ("a", "b")}
    optimizer, ema, found = optax.adam(0.1), params, []
    state = optimizer.init(params)
    for _ in range(count):
        grads = jax.grad(lambda params: loss_fn(params | frozen, batch))(params)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        ema = optax.incremental_update(params, ema, 1 - DECAY)
        found.append(ema | frozen)
    return found


def assert_equal(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12), found, expected)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "zero" in name else pytest.mark.full)
                                  for name in STRATEGIES])  # fmt: skip
def test_it_is_that_of_one_device_and_skips_what_is_skipped(name):
    params, batch = inputs()
    expected = averages(params, batch, 3)
    trainer = trainer_of(STRATEGIES[name], nonfinite="skip")
    state = trainer.init(params)
    assert_equal(trainer.params(state, "ema"), params)
    bad = {"x": np.full_like(batch["x"], np.nan)}
    for given in (batch, bad, batch, batch):
        state, metrics = trainer.step(state, given)
    assert metrics["skipped"] == 0
    assert_equal(trainer.params(state, which="ema"), expected[-1])
    held, memory = held_bytes(trainer.layout(state)), step_memory(trainer.compile(state, batch), state)
    assert memory.after_init.optimizer_state == held.optimizer_state
    shards = 8 * (-(-42 // 4) + -(-21 // 4)) if "zero" in name else 8 * 63
    other = trainer_of(STRATEGIES[name], ema_decay=None)
    without = held_bytes(other.layout(other.abstract_state(params)))
    assert held.optimizer_state - without.optimizer_state == shards
    trainer.check_replicas(state)


def test_it_is_restored_on_other_ranks_and_starts_at_parameters_saved_without_it(tmp_path):
    params, batch = inputs()
    expected = averages(params, batch, 3)
    for step, (strategy, num_ranks) in enumerate(((jaxddp.zero1(), 4), (jaxddp.naive(), 2), (jaxddp.zero3(), 1))):
        trainer = trainer_of(strategy, num_ranks)
        with Checkpoints(tmp_path / "with") as checkpoints:
            state = checkpoints.restore(trainer, params)[0] if step else trainer.init(params)
            state, _ = trainer.step(state, batch)
            checkpoints.save(trainer, state)
    assert_equal(trainer.params(state, "ema"), expected[-1])
    without = trainer_of(jaxddp.zero1(), ema_decay=None)
    with Checkpoints(tmp_path / "with") as checkpoints:  # one that is not asked for stays there
        state, _ = checkpoints.restore(without, params)
    with Checkpoints(tmp_path / "without") as checkpoints:
        checkpoints.save(without, state)
        trainer = trainer_of(jaxddp.zero1())
        restored, _ = checkpoints.restore(trainer, params)
    assert_equal(trainer.params(restored, "ema"), without.params(state))


def test_bad_input():
    params, _ = inputs()
    for decay in (1, -0.1, "0.9", True):
        with pytest.raises(ValueError, match=r"^ema_decay \(=.*\) must be at least 0 and below 1, or None$"):
            trainer_of(jaxddp.naive(), ema_decay=decay)
    trainer = trainer_of(jaxddp.naive(), ema_decay=None)
    state = trainer.init(params)
    with pytest.raises(ValueError, match=r"^which \(='ema'\) needs Trainer\(ema_decay=...\)$"):
        trainer.params(state, "ema")
    with pytest.raises(ValueError, match=r"^which \(='average'\) must be 'params' or 'ema'$"):
        trainer.params(state, "average")
