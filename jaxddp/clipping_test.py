"""Clipping equals optax's on whole gradients, wherever the shards lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.clipping import global_norm
from jaxddp.models import build

SMALL, LARGE = 0.05, 50.0  # below and above every norm seen here, 0.2 to 2


@pytest.mark.parametrize("max_norm", [SMALL, LARGE])
def test_alone_it_is_optaxs(max_norm):
    updates = {"a": jnp.array([[3.0, -4.0]]), "b": jnp.float32(0.5), "empty": jnp.zeros((0, 3))}
    ours, theirs = jaxddp.clip_by_global_norm(max_norm), optax.clip_by_global_norm(max_norm)
    for mine, other in zip(
        jax.tree.leaves(ours.update(updates, ours.init(updates))),
        jax.tree.leaves(theirs.update(updates, theirs.init(updates))),
        strict=True,
    ):
        np.testing.assert_allclose(mine, other, rtol=2e-7)  # one unit in the last place: the order of three squares


@pytest.mark.parametrize("max_norm", [SMALL, LARGE])
@pytest.mark.parametrize(
    "strategy", [jaxddp.bucketed(), jaxddp.zero1(0.005), jaxddp.zero3(min_shard_elements=100)], ids=lambda one: one.name
)
def test_in_a_chain_whose_state_is_sharded(strategy, max_norm):
    with jax.enable_x64(True):
        loss_fn, params = build("toy_unused")
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        rng = np.random.default_rng(0)
        batch = {"x": rng.normal(size=(12, 10)), "y": rng.normal(size=(12, 5))}
        trainer = jaxddp.Trainer(
            loss_fn, optax.chain(jaxddp.clip_by_global_norm(max_norm), optax.sgd(0.1)), strategy, jaxddp.data_mesh(3)
        )
        state, metrics = trainer.step(trainer.init(params), batch)
        ours = trainer.params(state)
        grads = jax.grad(loss_fn)(params, batch)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-13)
        clip = optax.clip_by_global_norm(max_norm)
        clipped, _ = clip.update(grads, clip.init(grads))
        for mine, param, grad in zip(*map(jax.tree.leaves, (ours, params, clipped)), strict=True):
            # float64: sums over ranks in another order, a few units in the last place of weights of order 1.
            np.testing.assert_allclose(mine, param - 0.1 * grad, rtol=0, atol=1e-14)


def test_the_norm_of_nothing_is_0_and_a_bad_limit_is_refused():
    assert float(global_norm({"empty": jnp.zeros(0)})) == 0
    with pytest.raises(ValueError, match=r"max_norm \(=0\) must be positive"):
        jaxddp.clip_by_global_norm(0)
