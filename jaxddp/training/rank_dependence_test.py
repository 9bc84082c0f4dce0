"""Gradients that differ between ranks though no input does: the rank is read inside a loop, a branch or a callback."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxddp

NUM_RANKS = 2


def noise(rank, i):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), 4 * i + rank), (3,))


def in_a_map(rank):
    return lax.map(lambda i: noise(rank(), i), jnp.arange(2)).sum(0)


def in_a_scan(rank):
    return lax.scan(lambda total, i: (total + noise(rank(), i), None), jnp.zeros(3), jnp.arange(2))[0]


def in_a_while_loop(rank):
    return lax.fori_loop(0, 2, lambda i, total: total + noise(rank(), i), jnp.zeros(3))


def in_a_branch(rank):
    return lax.cond(jnp.array(True), lambda: noise(rank(), 0) + noise(rank(), 1), lambda: jnp.zeros(3))


def from_a_collective(rank):
    del rank
    each = jnp.stack([noise(r, 0) + noise(r, 1) for r in range(NUM_RANKS)])
    return lax.psum_scatter(each, "data") / NUM_RANKS


def from_a_neighbour(rank):
    del rank
    each = jnp.stack([noise(r, 0) + noise(r, 1) for r in range(NUM_RANKS)])
    # Rank 0 sends to rank 1 the sum of both, and gets nothing.
    return lax.ppermute(each.sum(0), "data", [(0, 1)])


def rank():
    return lax.axis_index("data")


FORMS = {
    "map": in_a_map,
    "scan": in_a_scan,
    "while": in_a_while_loop,
    "cond": in_a_branch,
    "collective": from_a_collective,
    "neighbour": from_a_neighbour,
}
STRATEGIES = {"bucketed": {}, "zero1": {}, "zero3": {"min_shard_elements": 0}}


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_is_summed_over_ranks(form, strategy):
    def loss_fn(params, batch):
        return jnp.sum(FORMS[form](rank) * params["w"]) + jnp.mean((batch["x"] * params["v"]) ** 2)

    made = jaxddp.make_strategy(strategy, **STRATEGIES[strategy])
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), made, jaxddp.data_mesh(NUM_RANKS))
    state = trainer.init({"w": jnp.zeros(3), "v": jnp.ones(3)})
    state, _ = trainer.step(state, {"x": jnp.ones((4, 3))})
    each = np.stack([noise(rank, 0) + noise(rank, 1) for rank in range(NUM_RANKS)])
    np.testing.assert_allclose(trainer.params(state)["w"], -each.mean(0), rtol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_device_draws_random_numbers_of_its_own(strategy):
    def loss_fn(params, batch):
        return jnp.sum(lax.rng_uniform(0.0, 1.0, (3,)) * params["w"]) + jnp.mean((batch["x"] * params["v"]) ** 2)

    made = jaxddp.make_strategy(strategy, **STRATEGIES[strategy])
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), made, jaxddp.data_mesh(NUM_RANKS))
    state = trainer.init({"w": jnp.zeros(3), "v": jnp.ones(3)})
    batch = {"x": jnp.ones((4, 3))}
    assert "w" in trainer.plan(state, batch).names or strategy == "zero3"
    state, _ = trainer.step(state, batch)
    if strategy != "zero3":
        assert len({shard.data.tobytes() for shard in state.params["w"].addressable_shards}) == 1


@pytest.mark.parametrize("kind", ["pure_callback", "io_callback"])
def test_a_callback_may_give_each_rank_another_number(kind):
    calls = iter(range(100))

    def loss_fn(params, batch):
        callback = jax.pure_callback if kind == "pure_callback" else jax.experimental.io_callback
        number = callback(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), jnp.float32))
        return number * params["w"] + jnp.mean(batch["x"] * params["v"])

    trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), jaxddp.bucketed(), jaxddp.data_mesh(NUM_RANKS))
    state = trainer.init({"w": jnp.float32(0), "v": jnp.float32(1)})
    batch = {"x": jnp.ones((4,))}
    assert "w" in trainer.plan(state, batch).names
    state, _ = trainer.step(state, batch)
    replicas = {float(shard.data) for shard in state.params["w"].addressable_shards}
    assert len(replicas) == 1
