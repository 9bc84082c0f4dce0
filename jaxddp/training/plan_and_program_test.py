"""The plan is what the compiled step communicates, where the two were seen to differ."""

import jax.numpy as jnp
import optax
import pytest

import jaxddp

dense = jaxddp.layer(lambda params, x: jnp.tanh(x @ params["kernel"]))


def linear_loss(params, batch):
    return jnp.sum(params["b"] * jnp.arange(6.0)) + jnp.mean((batch["x"] @ params["w"]) ** 2)


def linear_in_all(params, batch):
    return jnp.sum(params["b"] * jnp.arange(6.0))


def one_layer_twice(params, batch):
    return jnp.mean(dense(params["l"], dense(params["l"], batch["x"])) ** 2)


def one_layer_thrice_and_another(params, batch):
    x = dense(params["l"], dense(params["l"], dense(params["l"], batch["x"])))
    return jnp.mean(dense(params["m"], x) ** 2)


def one_layer_far_apart(params, batch):
    x = dense(params["l"], batch["x"])
    return jnp.mean(dense(params["l"], dense(params["m"], x)) ** 2)


def unit_with_unused_leaves(params, batch):
    unit = jaxddp.layer(lambda p, x: x @ p["kernel"])
    unused = jaxddp.layer(lambda p, x: x * 2.0)
    return jnp.mean(unused(params["u"], unit(params["l"], batch["x"])) ** 2)


def unit_with_a_part_unused(params, batch):
    unit = jaxddp.layer(lambda p, x: jnp.tanh(x @ p["used"]["kernel"]))
    return jnp.mean(unit({"used": params["l"], "unused": params["u"]}, batch["x"]) ** 2)


def unit_without_gradients(params, batch):
    unit = jaxddp.layer(lambda p, x: x @ p["kernel"])
    signs = jaxddp.layer(lambda p, x: jnp.where(p["kernel"][0] > 17, x, -x))
    return jnp.mean(signs(params["u"], unit(params["l"], batch["x"])) ** 2)


def kernel():
    return {"kernel": 0.1 * jnp.arange(36.0).reshape(6, 6)}


CASES = {
    "linear": (linear_loss, lambda: {"b": jnp.ones(6), "w": jnp.ones((6, 2))}),
    "linear in all": (linear_in_all, lambda: {"b": jnp.ones(6)}),
    "one layer twice": (one_layer_twice, lambda: {"l": kernel()}),
    "one layer thrice": (one_layer_thrice_and_another, lambda: {"l": kernel(), "m": kernel()}),
    "one layer far apart": (one_layer_far_apart, lambda: {"l": kernel(), "m": kernel()}),
    "unit unused": (unit_with_unused_leaves, lambda: {"l": kernel(), "u": kernel()}),
    "part unused": (unit_with_a_part_unused, lambda: {"l": kernel(), "u": kernel()}),
    "unit without gradients": (unit_without_gradients, lambda: {"l": kernel(), "u": kernel()}),
}


def compare(trainer, params, batch):
    state = trainer.abstract_state(params)
    planned = trainer.planned(state, batch)
    assert sorted(planned) == sorted(jaxddp.gradient_collectives(trainer.compile(state, batch)))


@pytest.mark.sample
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_zero3(case, num_microbatches):
    loss_fn, make = CASES[case]
    strategy = jaxddp.zero3(min_shard_elements=0)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(2), num_microbatches=num_microbatches)
    compare(trainer, make(), {"x": jnp.ones((12, 6))})


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_zero2_with_a_bucket_that_no_example_touches(num_microbatches):
    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2) + jnp.sum(params["r"] ** 2)

    strategy = jaxddp.zero2(1e-6)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(2), num_microbatches=num_microbatches)
    compare(trainer, {"w": jnp.ones((6, 2)), "r": jnp.ones((5, 3))}, {"x": jnp.ones((16, 6))})


def test_a_plan_of_another_loss_is_refused_where_it_would_send_less():
    def make(loss_fn):
        return jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh(2))

    with_bias = make(lambda params, batch: jnp.mean((batch["x"] @ params["w"] + params["b"]) ** 2))
    without = make(lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2))
    params, batch = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, {"x": jnp.ones((4, 3))}
    state = without.init(params)
    assert without.plan(state, batch).constants == ("b",)
    with pytest.raises(ValueError, match="plan takes the gradient of 'b' as constant, and it is not"):
        with_bias.step_function(state, batch, without.plan(state, batch))
    without.step_function(state, batch, with_bias.plan(state, batch))
