"""The norm of a part of a list: its leaves have other places than the parameters, so it is refused on shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.zero import clipping


def clip_a_part(part):
    def update(updates, state, params=None):
        del params
        norm = clipping.global_norm(part(updates))
        return jax.tree.map(lambda leaf: leaf / norm, updates), state

    return optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(0.1))


def train(strategy, optimizer, params):
    def loss_fn(params, batch):
        return sum(jnp.mean(batch["x"]) * jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(params))

    trainer = jaxddp.Trainer(loss_fn, optimizer, strategy, jaxddp.data_mesh(2))
    state, _ = trainer.step(trainer.init(params), {"x": jnp.ones((4, 3))})
    return trainer.params(state)


STRATEGIES = [jaxddp.zero1(), jaxddp.zero3(min_shard_elements=0)]


def params_of():
    return [jnp.arange(1.0, 4.0), jnp.arange(1.0, 5.0), jnp.arange(1.0, 4.0)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["zero1", "zero3"])
def test_a_part_of_a_list_is_refused(strategy):
    with pytest.raises(ValueError, match="updates in shards must keep the names of parameters.*whole tree"):
        train(strategy, clip_a_part(lambda updates: updates[1:]), params_of())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["zero1", "zero3"])
@pytest.mark.parametrize(
    ("params", "part"),
    [
        (params_of, lambda updates: updates),
        (params_of, lambda updates: [updates[0], None, updates[2]]),
        (params_of, lambda updates: [optax.MaskedNode(), updates[1], updates[2]]),
        (lambda: dict(zip("abc", params_of(), strict=True)), lambda updates: {"b": updates["b"], "c": updates["c"]}),
    ],
    ids=["whole", "None", "masked", "by key"],
)
def test_what_keeps_its_place_is_clipped_as_the_whole(strategy, params, part):
    found = train(strategy, clip_a_part(part), params())
    expected = train(jaxddp.naive(), clip_a_part(part), params())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
