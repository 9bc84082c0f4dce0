"""Optimizers that look at all gradients, or want more than them: they train as on one device, or are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp

STRATEGIES = {
    "naive": jaxddp.naive(),
    "zero1": jaxddp.zero1(),
    "zero1 by leaves": jaxddp.zero1(shard="leaves"),
    "zero3": jaxddp.zero3(min_shard_elements=0),
}
ELEMENTS, LEAVES = (
    r"^optimizer must be element-wise to be sharded: ",
    r"^optimizer must update each parameter by itself",
)
NEEDS = r"^optimizer must update from gradients like the parameters, and value=loss, alone: "
CASES = {  # of each optimizer, the strategies that refuse it
    "apply_if_finite": (
        lambda: optax.apply_if_finite(optax.adam(0.1), 3),
        {"zero1": ELEMENTS, "zero3": ELEMENTS, "zero1 by leaves": LEAVES},
    ),
    "zero_nans": (
        lambda: optax.chain(optax.zero_nans(), optax.adam(0.1)),
        {"zero1": ELEMENTS, "zero3": ELEMENTS},
    ),
    "lbfgs without line search": (
        lambda: optax.chain(optax.scale_by_lbfgs(), optax.scale(-0.1)),
        {"zero1": ELEMENTS, "zero3": ELEMENTS, "zero1 by leaves": LEAVES},
    ),
    "lbfgs": (
        optax.lbfgs,
        {"zero1": ELEMENTS, "zero3": ELEMENTS} | dict.fromkeys(("naive", "zero1 by leaves"), NEEDS + ".*value_fn"),
    ),
    "lookahead": (
        lambda: optax.lookahead(optax.adam(0.1), 2, 0.5),
        {"zero1": ELEMENTS, "zero3": ELEMENTS}
        | dict.fromkeys(("naive", "zero1 by leaves"), NEEDS + "pytree structure error"),
    ),
}


def loss_fn(params, batch):
    params = getattr(params, "fast", params)
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"]) ** 2)


def inputs(name):
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(6, 8)), "b": rng.normal(size=(8, 3))}
    batch = {"x": rng.normal(size=(16, 6))}
    return optax.LookaheadParams.init_synced(params) if name == "lookahead" else params, batch


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_on_one_device_or_is_refused_in_one_line(name, strategy):
    make, refusals = CASES[name]
    params, batch = inputs(name)
    trainer = jaxddp.Trainer(loss_fn, make(), STRATEGIES[strategy], jaxddp.data_mesh(2))
    if strategy in refusals:
        with pytest.raises(ValueError, match=refusals[strategy]) as caught:
            trainer.compile(trainer.abstract_state(params), batch)
        assert "\n" not in str(caught.value)
        return
    state = trainer.init(params)
    optimizer = optax.with_extra_args_support(make())
    opt_state = optimizer.init(params)
    for _ in range(3):
        state, _ = trainer.step(state, batch)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12), trainer.params(state), params)
