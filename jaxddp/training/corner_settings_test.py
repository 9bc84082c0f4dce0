"""Settings and uses at the edge: strict promotion, a frozen PRNG key, Flax's state, bound keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import jaxddp
from jaxddp.comparison_test import refusal

STRATEGIES = {"bucketed": jaxddp.bucketed(), "zero1": jaxddp.zero1(), "zero3": jaxddp.zero3(min_shard_elements=0)}


def make(loss_fn, name, **options):
    return jaxddp.Trainer(loss_fn, optax.sgd(0.1), STRATEGIES[name], jaxddp.data_mesh(2), **options)


def counted(params, batch):
    return jaxddp.Weighted(jnp.sum((batch["x"] @ params["w"]) ** 2), jnp.sum(batch["mask"] > 0))


BATCH = {"x": jnp.arange(24.0).reshape(8, 3) / 24, "mask": jnp.ones(8)}


@pytest.mark.sample
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_strict_promotion_of_integer_weights(name, dtype):
    options = {"num_microbatches": 2, "max_grad_norm": 1e9}
    with jax.enable_x64(dtype == "float64"):
        params, batch = {"w": np.ones((3, 2), dtype)}, {key: np.asarray(leaf, dtype) for key, leaf in BATCH.items()}
        expected = make(counted, name, **options)
        expected_state, expected_metrics = expected.step(expected.init(params), batch)
        with jax.numpy_dtype_promotion("strict"):
            trainer = make(counted, name, **options)
            state, metrics = trainer.step(trainer.init(params), batch)
            trainer.evaluate(state, batch)
        np.testing.assert_array_equal(trainer.params(state)["w"], expected.params(expected_state)["w"])
        assert metrics["loss"] == expected_metrics["loss"]


def test_a_frozen_prng_key():
    def loss_fn(params, batch):
        noise = jax.random.normal(params["key"], batch["x"].shape)
        return jnp.mean(((batch["x"] + noise) @ params["w"]) ** 2)

    trainer = make(loss_fn, "zero3", trainable=lambda name: name == "w")
    params = {"w": jnp.ones((3, 2)), "key": jax.random.key(3)}
    state, metrics = trainer.step(trainer.init(params), BATCH)
    assert jnp.isfinite(metrics["loss"])
    assert jax.random.key_data(trainer.params(state)["key"]).tolist() == jax.random.key_data(params["key"]).tolist()


VARIABLES = {"params": {"w": jnp.ones((3, 2))}, "batch_stats": {"mean": jnp.zeros(2)}}


def test_linen_variables_are_refused_where_statistics_would_be_trained():
    for params, name in (
        (VARIABLES, "batch_stats.mean"),
        (({"w": jnp.ones(2)}, VARIABLES), "1.batch_stats.mean"),
        (flatten_dict(VARIABLES, sep="/"), "batch_stats/mean"),
    ):
        found = refusal(make(lambda params, batch: 0.0, "bucketed").init, params)
        assert f"{name!r} is what Flax calls state" in found and "has_state=" in found
        make(lambda params, batch: 0.0, "bucketed", trainable=lambda name: "batch_stats" not in name).init(params)


class Own(nnx.Variable):
    pass


@pytest.mark.parametrize("kind", [nnx.BatchStat, nnx.RngKey])
def test_nnx_state_is_refused_where_more_than_parameters_would_be_trained(kind):
    state = nnx.State({"w": nnx.Param(jnp.ones(3)), "own": Own(jnp.ones(3)), "x": nnx.State({"y": kind(jnp.ones(3))})})
    found = refusal(make(lambda params, batch: 0.0, "bucketed").init, state)
    assert "'x.y' is what Flax calls state" in found
    make(lambda params, batch: 0.0, "bucketed", trainable=lambda name: name != "x.y").init(state)
    assert "'y' is what Flax" in refusal(
        make(lambda params, batch: 0.0, "bucketed").init, {"y": kind({"m": jnp.ones(3)})}
    )
    make(lambda params, batch: 0.0, "bucketed").init(nnx.State({"w": state["w"], "own": state["own"]}))


def through(function):
    return functools.wraps(function)(lambda *args, **named: function(*args, **named))


WRAPPERS = {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint, "wraps": through}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_key_that_is_bound_stays_and_one_that_is_not_is_given(wrapper):
    def keyed(params, batch, key=None, scale=1):
        return scale * jnp.sum(jax.random.normal(key, (3,))[:, None] * params["w"])

    bound = functools.partial(WRAPPERS[wrapper](functools.partial(keyed, key=jax.random.key(5))), scale=2)
    trainer = make(bound, "bucketed")
    params = {"w": jnp.ones((3, 2))}
    expected = keyed(params, None, jax.random.key(5), 2)
    state = trainer.init(params)
    np.testing.assert_allclose(trainer.evaluate(state, BATCH), expected, rtol=1e-6)
    _, metrics = trainer.step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)

    def free(params, batch, scale, key):
        return keyed(params, batch, key, scale)

    trainer = make(WRAPPERS[wrapper](functools.partial(free, scale=2)), "bucketed")
    state, first = trainer.step(trainer.init(params), BATCH)
    assert first["loss"] != trainer.step(state, BATCH)[1]["loss"]


KEY = jax.random.key(0)


def loss_of_key(params, batch, *, key=KEY):
    return (0.0 if key is None else jax.random.uniform(key)) + 0 * params["w"].sum()


@pytest.mark.parametrize(("loss_fn", "num_losses"), [(loss_of_key, 3), (functools.partial(loss_of_key, key=None), 1)])
def test_a_default_is_no_key_that_is_bound_and_none_is(loss_fn, num_losses):
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh(2))
    state, losses = trainer.init({"w": jnp.ones(3)}), set()
    for _ in range(3):
        state, metrics = trainer.step(state, jnp.ones((2, 3)))
        losses.add(float(metrics["loss"]))
    assert len(losses) == num_losses
