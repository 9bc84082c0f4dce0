"""Optimizers that look at all gradients, or want more than them: they train as on one device, or are refused."""

import re

import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp.comparison_test import assert_near, drawn, on_one_device, refusal, trained

pytestmark = pytest.mark.usefixtures("x64")
STRATEGIES = {
    "naive": jaxddp.naive(),
    "zero1": jaxddp.zero1(),
    "zero1 by leaves": jaxddp.zero1(shard="leaves"),
    "zero3": jaxddp.zero3(min_shard_elements=0),
}
ELEMENTS = r"^optimizer must be element-wise to be sharded: "
LEAVES = r"^optimizer must update each parameter by itself"
CASES = {  # of each optimizer, the strategies that refuse it
    "apply_if_finite": (
        lambda: optax.apply_if_finite(optax.adam(0.1), 3),
        {"zero1": ELEMENTS, "zero3": ELEMENTS, "zero1 by leaves": LEAVES},
    ),
    "zero_nans": (lambda: optax.chain(optax.zero_nans(), optax.adam(0.1)), {"zero1": ELEMENTS, "zero3": ELEMENTS}),
    "reduce_on_plateau": (  # at every step
        lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, rtol=1.0)),
        {},
    ),
    "while the loss falls it does nothing": (
        lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)),
        {},
    ),
}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"]) ** 2)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_on_one_device_or_is_refused_in_one_line(name, strategy):
    make, refusals = CASES[name]
    params, batch = drawn(0, a=(6, 8), b=(8, 3)), drawn(1, x=(16, 6))
    trainer = jaxddp.Trainer(loss_fn, make(), STRATEGIES[strategy], jaxddp.data_mesh(2))
    if strategy in refusals:
        assert re.match(refusals[strategy], refusal(lambda: trainer.compile(trainer.abstract_state(params), batch)))
        return
    state, _ = trained(trainer, trainer.init(params), [batch] * 3)
    assert_near(trainer.params(state), on_one_device(loss_fn, params, [batch] * 3, make()))
