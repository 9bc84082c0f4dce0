"""A weight that depends on the parameters has a derivative, which a sum of totals lacks: refused."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp.comparison_test import refusal

STRATEGIES = {"bucketed": {}, "zero1": {}, "zero3": {"min_shard_elements": 0}}


def step(loss_fn, strategy, **options):
    made = jaxddp.make_strategy(strategy, **STRATEGIES[strategy])
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), made, jaxddp.data_mesh(2), **options)
    state = trainer.init({"w": jnp.ones(3), "v": jnp.ones(3)})
    return trainer.step(state, {"x": jnp.ones((8, 3)), "mask": jnp.ones(8)})


@pytest.mark.sample
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_refused(strategy, num_microbatches):
    def loss_fn(params, batch):
        score = jax.nn.sigmoid(batch["x"] @ params["w"])
        return jaxddp.Weighted(jnp.sum(score * (batch["x"] @ params["v"]) ** 2), jnp.sum(score))

    found = refusal(step, loss_fn, strategy, num_microbatches=num_microbatches)
    assert "weight of jaxddp.Weighted must not depend on the parameters" in found and "stop_gradient" in found


@pytest.mark.sample
@pytest.mark.parametrize(
    "weight",
    [
        lambda params, batch: jnp.sum(batch["mask"].astype(jnp.int32)),
        lambda params, batch: jax.lax.stop_gradient(jnp.sum(jax.nn.sigmoid(batch["x"] @ params["w"]))),
        lambda params, batch: jnp.sum(batch["x"] @ params["w"] > 0.5),
        lambda params, batch: 8.0,
        lambda params, batch: jax.lax.scan(
            lambda c, x: ((c[0] + x @ params["w"], c[1] + 1.0), None), (0.0, 0.0), batch["x"]
        )[0][1],
    ],
    ids=["integers", "stopped", "compared", "number", "counted in a loop"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_without_a_derivative_pass(strategy, weight):
    unit = jaxddp.layer(lambda params, x: x * params["w"])

    def loss_fn(params, batch):
        hidden = unit({"w": params["w"]}, batch["x"])
        return jaxddp.Weighted(jnp.sum(batch["mask"] * (hidden @ params["v"]) ** 2), weight(params, batch))

    step(loss_fn, strategy)


def test_a_frozen_parameter_may_decide_the_weight():
    def loss_fn(params, batch):
        return jaxddp.Weighted(jnp.sum((batch["x"] @ params["v"]) ** 2), jnp.sum(batch["x"] @ params["w"]))

    step(loss_fn, "bucketed", trainable=lambda name: name == "v")
