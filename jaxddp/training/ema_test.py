"""The moving average of parameters: that of one device under every strategy, in shards, and evaluated in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.comparison_test import assert_near, drawn, refusal, trained
from jaxddp.instruments.inspect import held_bytes

pytestmark = pytest.mark.usefixtures("x64")
DECAY = 0.9
STRATEGIES = {
    "bucketed": jaxddp.bucketed(),
    "zero1": jaxddp.zero1(),
    "zero2 by leaves": jaxddp.zero2(shard="leaves"),
    "zero3": jaxddp.zero3(min_shard_elements=10),
}


def loss_fn(params, batch):
    x = jnp.tanh(batch["x"].astype(params["a"].dtype) @ params["a"]) * params["scale"]
    return jnp.mean((x @ params["b"]) ** 2)


def inputs():
    return drawn(0, a=(6, 7), b=(7, 3)) | {"scale": np.full(7, 2.0)}, drawn(1, x=(16, 6))


def adam_with_average(decay=DECAY):
    return optax.chain(optax.adam(0.1), jaxddp.params_ema(decay))


def trainer_of(strategy, num_ranks=4, optimizer=None, **options):
    optimizer, options = optimizer or adam_with_average(), {"trainable": lambda name: name != "scale"} | options
    mesh = jax.make_mesh((num_ranks,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    return jaxddp.Trainer(loss_fn, optimizer, strategy, mesh, **options)


def averages_on_one_device(loss_fn, params, batches):
    """Parameters, and of them ``optax.incremental_update`` after each step, of Adam."""
    average, optimizer = params, optax.adam(0.1)
    state = optimizer.init(params)

    @jax.jit
    def step(params, average, state, batch):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 1 - DECAY), state

    for batch in batches:
        params, average, state = step(params, average, state, batch)
    return params, average


@pytest.mark.sample
@pytest.mark.parametrize("compute_dtype", [None, jnp.float32])
@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_that_of_one_device_in_shards_and_evaluated(name, compute_dtype):
    # Sums of products in float32, of gradients around 1, over three steps of Adam.
    atol = 1e-12 if compute_dtype is None else 1e-6
    params, batch = inputs()

    def loss(trained, batch):
        copies = trained | {"scale": params["scale"]}
        return loss_fn(jax.tree.map(lambda leaf: leaf.astype(compute_dtype or np.float64), copies), batch)

    expected = averages_on_one_device(loss, {name: params[name] for name in ("a", "b")}, [batch] * 3)[1]
    expected |= {"scale": params["scale"]}
    trainer = trainer_of(STRATEGIES[name], nonfinite="skip", compute_dtype=compute_dtype)
    state = trainer.init(params)
    assert_near(trainer.params(trainer.averaged(state)), params)
    state, _ = trained(trainer, state, [batch, {"x": np.full_like(batch["x"], np.nan)}, batch, batch])
    averaged = trainer.averaged(state)
    assert_near(trainer.params(averaged), expected, atol)
    own = jax.tree.map(lambda leaf: leaf.astype(compute_dtype or leaf.dtype), expected)
    np.testing.assert_allclose(trainer.evaluate(averaged, batch), loss_fn(own, batch), rtol=0, atol=10 * atol)
    found = trainer.evaluate(
        averaged, batch, lambda params, batch: {"a": jaxddp.Mean(batch["x"] * 0 + params["a"][0, 0])}
    )
    np.testing.assert_allclose(found["a"], expected["a"][0, 0], rtol=0, atol=max(atol, 1e-7 * bool(compute_dtype)))
    jaxddp.check_replicas(trainer, averaged)
    without = trainer_of(STRATEGIES[name], optimizer=optax.adam(0.1), compute_dtype=compute_dtype)
    layouts = trainer.layout(state), without.layout(without.abstract_state(params))
    held, other = (held_bytes(layout).optimizer_state for layout in layouts)
    shards = {"zero2 by leaves": 42}.get(name, -(-42 // 4) + -(-21 // 4) if "zero" in name else 63)
    assert held - other == 8 * shards
    assert int(trainer.step(state, batch)[1]["skipped"]) == 0  # a state may be averaged and trained on


@pytest.mark.sample
@pytest.mark.parametrize("name", [name for name in STRATEGIES if "zero" in name])
@pytest.mark.parametrize(("is_array", "compute_dtype"), [(True, None), (False, None), (True, "float64")])
def test_parameters_named_by_nothing_come_back_with_moments_and_averages(name, is_array, compute_dtype, tmp_path):
    """One array, or the key "" of a dictionary."""

    def loss_fn(params, batch):
        (w,) = jax.tree.leaves(params)
        return jnp.mean((batch["x"] @ w) ** 2)

    w, batches = drawn(w=(4, 2))["w"], [drawn(step, x=(12, 4)) for step in range(6)]
    params = w if is_array else {"": w}
    saves, goes_on = (
        jaxddp.Trainer(loss_fn, adam_with_average(), *on_ranks, compute_dtype=compute_dtype)
        for on_ranks in ((STRATEGIES[name], jaxddp.data_mesh(4)), (jaxddp.naive(), jaxddp.data_mesh(2)))
    )
    state, _ = trained(saves, saves.init(params), batches[:3])
    with jaxddp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saves, state)
        alone = checkpoints.restore_params(params)
        restored, _ = checkpoints.restore(goes_on, params)
    assert_near(alone, goes_on.params(restored), atol=0)
    state, _ = trained(goes_on, restored, batches[3:])
    found = goes_on.params(state), goes_on.params(goes_on.averaged(state))
    assert_near(found, averages_on_one_device(loss_fn, params, batches))


def test_bad_input():
    for decay in (1, -0.1):
        assert f"decay (={decay!r}) must be at least 0 and below 1" in refusal(jaxddp.params_ema, decay)
    params = {"w": jnp.ones(2)}  # which a loop may donate beside the state
    assert jaxddp.params_ema(0.5).init(params).ema["w"] is not params["w"]
    twice = optax.chain(adam_with_average(), jaxddp.params_ema(0.5))
    for optimizer, count in ((optax.adam(0.1), 0), (twice, 2)):
        trainer = trainer_of(jaxddp.zero1(), optimizer=optimizer)
        assert f"and keeps {count}" in refusal(trainer.averaged, trainer.init(inputs()[0]))
    ema, params = jaxddp.params_ema(0.5), inputs()[0]
    assert "must be given the parameters" in refusal(ema.update, params, ema.init(params))
    partly = optax.masked(jaxddp.params_ema(0.5), {"a": True, "b": False, "scale": None})
    trainer = trainer_of(jaxddp.bucketed(), optimizer=optax.chain(optax.adam(0.1), partly))
    with pytest.raises(ValueError, match="None"):  # of two trees that differ
        trainer.averaged(trainer.init(inputs()[0]))
