"""Loss functions as users write them, with their parameters in shards: gradients, and how often units are gathered."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxddp

WIDTH, NUM_LAYERS = 8, 3
dense = jaxddp.layer(lambda params, x: jnp.tanh(x @ params["kernel"] + params["bias"]))


def mean_square(x, batch):
    return jnp.mean((x - batch["y"]) ** 2)


def chain(layers, x, unit=dense):
    for params in layers:
        x = unit(params, x)
    return x


def loop(params, batch):
    return mean_square(chain(params["layers"], batch["x"]), batch)


def scan(params, batch):
    x, _ = lax.scan(lambda x, one: (dense(one, x), None), batch["x"], params["stack"])
    return mean_square(x, batch)


def rows_of_a_stack(params, batch):
    stack = params["stack"]
    rows = [{"kernel": stack["kernel"][i, :, :], "bias": stack["bias"][i]} for i in range(NUM_LAYERS)]
    return mean_square(chain(rows, batch["x"]), batch)


def each_in_a_jit(params, batch):
    return mean_square(chain(params["layers"], batch["x"], jax.jit(lambda one, x: dense(one, x))), batch)


def each_in_a_checkpoint(params, batch):
    return mean_square(chain(params["layers"], batch["x"], jax.checkpoint(lambda one, x: dense(one, x))), batch)


def vmapped_over_examples(params, batch):
    return mean_square(jax.vmap(lambda x: chain(params["layers"], x))(batch["x"]), batch)


def penalty_over_leaves(params, batch):
    leaves = jax.tree.leaves(params["layers"])
    penalty = sum(jnp.sum(leaf**2) for leaf in leaves if leaf.ndim > 1) / sum(leaf.size for leaf in leaves)
    return loop(params, batch) + penalty


def gradient_inside(params, batch):
    grads = jax.grad(lambda one: jnp.sum(dense(one, jnp.ones((1, WIDTH)))))(params["layers"][0])
    return loop(params, batch) + sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads))


def used_outside_and_closed_over(params, batch):
    kernel = params["layers"][0]["kernel"]
    unit = jaxddp.layer(lambda one, x: dense(one, x @ kernel))
    return mean_square(unit(params["layers"][1], jnp.einsum("bi,ij->bj", batch["x"], kernel)), batch)


def keys(params, batch, key):
    unit = jaxddp.layer(lambda one, x, key: dense(one, x) * jax.random.bernoulli(key, 1.0, x.shape))
    return mean_square(chain(params["layers"], batch["x"], lambda one, x: unit(one, x, key)), batch)


def flax_module(params, batch):
    module = nn.Dense(WIDTH, param_dtype=jnp.float64)
    return mean_square(module.apply({"params": params["layers"][0]}, batch["x"]), batch)


# A unit is gathered in the forward and in the backward; a loop's last one keeps its parameters.
UNROLLED, EVERY_ONE_TWICE = 2 * NUM_LAYERS - 1, 2 * NUM_LAYERS
GATHERS = {
    loop: UNROLLED,
    scan: EVERY_ONE_TWICE,
    rows_of_a_stack: UNROLLED,
    each_in_a_jit: EVERY_ONE_TWICE,
    each_in_a_checkpoint: 3 * NUM_LAYERS,
    vmapped_over_examples: UNROLLED,
    penalty_over_leaves: 1 + UNROLLED,  # kernels first, biases in units
    gradient_inside: None,
    used_outside_and_closed_over: 1 + 1,
    keys: UNROLLED,
    flax_module: 1,
}


@pytest.mark.parametrize("loss_fn", GATHERS, ids=lambda loss_fn: loss_fn.__name__)
def test_gradients_are_those_of_one_device_and_units_are_gathered_when_used(loss_fn):
    rng = np.random.default_rng(0)
    layers = [{"kernel": rng.normal(size=(WIDTH, WIDTH)), "bias": rng.normal(size=WIDTH)} for _ in range(NUM_LAYERS)]
    params = {"layers": layers}
    if loss_fn in (scan, rows_of_a_stack):
        params = {"stack": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}
    batch = {name: rng.normal(size=(4, WIDTH)) for name in "xy"}
    with jax.enable_x64(True):
        args = (jax.random.key(0),) if loss_fn is keys else ()
        expected = jax.grad(loss_fn)(jax.tree.map(jnp.asarray, params), batch, *args)
        strategy = jaxddp.zero3(min_shard_elements=0)
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), strategy, jaxddp.data_mesh(2))
        state = trainer.init(params)
        gathers = [kind for kind, _ in trainer.planned(state, batch)].count("all-gather")
        after, _ = trainer.step(state, batch)
        grads = jax.tree.map(lambda old, new: old - new, params, trainer.params(after))
    assert GATHERS[loss_fn] in (None, gathers)
    # Float64 roundings of parameters of size 1, from which gradients are told.
    for grad, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(grad, want, rtol=0, atol=1e-12)
