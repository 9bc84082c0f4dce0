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
    return jnp.cos(4.0 * i + rank + jnp.arange(3))


def in_a_scan(rank):
    return lax.scan(lambda total, i: (total + noise(rank(), i), None), jnp.zeros(3), jnp.arange(2))[0]


def in_a_while_loop(rank):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + noise(rank(), c[0])), (0, jnp.zeros(3)))[1]


def in_a_branch(rank):
    return lax.cond(jnp.array(True), lambda: noise(rank(), 0) + noise(rank(), 1), lambda: jnp.zeros(3))


def of_each():
    return jnp.stack([noise(rank, 0) + noise(rank, 1) for rank in range(NUM_RANKS)])


def from_a_collective(_):
    return lax.psum_scatter(of_each(), "data") / NUM_RANKS


def from_a_neighbour(_):
    # Rank 0 sends to rank 1 the sum of both, and gets nothing.
    return lax.ppermute(of_each().sum(0), "data", [(0, 1)])


def rank():
    return lax.axis_index("data")


FORMS = (in_a_scan, in_a_while_loop, in_a_branch, from_a_collective, from_a_neighbour)
STRATEGIES = {"bucketed": jaxddp.bucketed(), "zero1": jaxddp.zero1(), "zero3": jaxddp.zero3(min_shard_elements=0)}


def trained(loss_fn, strategy):
    """The trainer, whether it plans to send the gradient of w, and the state after a step."""
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), STRATEGIES[strategy], jaxddp.data_mesh(NUM_RANKS))
    state, batch = trainer.init({"w": jnp.zeros(3), "v": jnp.ones(3)}), {"x": jnp.ones((4, 3))}
    is_sent = "w" in trainer.plan(state, batch).names
    return trainer, is_sent, trainer.step(state, batch)[0]


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_gradient_is_summed_over_ranks(form, strategy):
    def loss_fn(params, batch):
        return jnp.sum(form(rank) * params["w"]) + jnp.mean((batch["x"] * params["v"]) ** 2)

    trainer, _, state = trained(loss_fn, strategy)
    np.testing.assert_allclose(trainer.params(state)["w"], -of_each().mean(0), rtol=1e-6)


def called_back(callback):
    calls = iter(range(100))
    return lambda: callback(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), jnp.float32))


@pytest.mark.parametrize(
    ("draw", "strategy"),
    [
        *((lambda: lax.rng_uniform(0.0, 1.0, (3,)), name) for name in STRATEGIES),
        (called_back(jax.pure_callback), "bucketed"),
        (called_back(jax.experimental.io_callback), "bucketed"),
    ],
)
def test_random_numbers_and_callbacks_may_give_each_rank_another_number(draw, strategy):
    def loss_fn(params, batch):
        return jnp.sum(draw() * params["w"]) + jnp.mean(batch["x"] * params["v"])

    _, is_sent, state = trained(loss_fn, strategy)
    if strategy != "zero3":
        assert is_sent and len({shard.data.tobytes() for shard in state.params["w"].addressable_shards}) == 1
