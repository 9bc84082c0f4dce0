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


@pytest.mark.sample
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
        grads = jax.jit(jax.grad(loss_fn))(params, batch)
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


@pytest.mark.parametrize("strategy", [jaxddp.zero1(), jaxddp.zero3(min_shard_elements=2)], ids=lambda one: one.name)
def test_padding_and_what_is_empty_count_for_nothing_whatever_an_optimizer_makes_of_them(strategy):
    """Adam with eps = 0 divides the zeros of padding by zero."""
    params = {"scale": jnp.ones(1), "w": jnp.arange(1.0, 6.0), "empty": jnp.ones((0, 3))}
    optimizer = optax.chain(optax.scale_by_adam(eps=0), jaxddp.clip_by_global_norm(0.1), optax.sgd(0.1))

    def loss_fn(params, x):
        return jnp.mean(x) * params["scale"][0] * jnp.sum(params["w"] ** 2)

    def moved(strategy, num_ranks):
        trainer = jaxddp.Trainer(loss_fn, optimizer, strategy, jaxddp.data_mesh(num_ranks))
        state, _ = trainer.step(trainer.init(params), np.ones((4, 1), np.float32))
        return trainer.params(state)

    ours, full = moved(strategy, 4), moved(jaxddp.naive(), 1)
    for name in params:
        np.testing.assert_allclose(ours[name], full[name], atol=1e-7)  # one unit in the last place of 1


def test_a_part_of_the_tree_is_refused_on_shards():
    """Under names of its own, what is a shard of what is not known."""
    clip = jaxddp.clip_by_global_norm(0.1)
    part = optax.stateless(lambda updates, params: updates | {"inner": clip.update(updates["inner"], ())[0]})
    params = {"inner": {"w": jnp.ones(8)}, "outer": jnp.ones(8)}
    trainer = jaxddp.Trainer(
        lambda p, x: jnp.mean(x) * jnp.sum(p["inner"]["w"] * p["outer"]), part, jaxddp.zero1(), jaxddp.data_mesh(4)
    )
    with pytest.raises(ValueError, match=r"must keep the names of parameters, and 'w' is none: clip the whole tree"):
        trainer.compile(trainer.init(params), np.ones((4, 1), np.float32))
