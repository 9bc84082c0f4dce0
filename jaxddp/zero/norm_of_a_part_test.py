"""Norms of parts of a tree: a leaf that is not under the name of a parameter of its shape is refused on shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp import clipping
from jaxddp.comparison_test import refusal


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


def assert_trained_as_whole(strategy, optimizer, params):
    found, expected = train(strategy, optimizer, params), train(jaxddp.naive(), optimizer, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


STRATEGIES = [jaxddp.zero1(), jaxddp.zero3(min_shard_elements=0)]


def params_of():
    return [jnp.arange(1.0, 4.0), jnp.arange(1.0, 5.0), jnp.arange(1.0, 4.0)]


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["zero1", "zero3"])
@pytest.mark.parametrize(
    ("params", "part"),
    [
        (params_of, lambda updates: updates[1:]),
        (lambda: [jnp.ones(2), jnp.ones(5)], lambda updates: updates[::-1]),
        (lambda: {"a": jnp.ones(3), "b": jnp.ones(4)}, lambda updates: {"a": updates["b"], "b": updates["a"]}),
        (lambda: {"a": jnp.ones((3, 4))}, lambda updates: {"a": updates["a"].T}),
    ],
    ids=["part", "reversed", "swapped", "transposed"],
)
def test_a_leaf_in_the_place_of_another_shape_is_refused(strategy, params, part):
    found = refusal(train, strategy, clip_a_part(part), params())
    assert "updates in shards must keep the names of parameters" in found


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["zero1", "zero3"])
@pytest.mark.parametrize(
    ("params", "part"),
    [
        (params_of, lambda updates: updates),
        (params_of, lambda updates: [updates[0], None, updates[2]]),
        (params_of, lambda updates: [optax.MaskedNode(), updates[1], updates[2]]),
        (lambda: [params_of()[0] + i for i in range(3)], lambda updates: updates[:0:-1]),
        (lambda: dict(zip("abc", params_of(), strict=True)), lambda updates: {"b": updates["b"], "c": updates["c"]}),
    ],
    ids=["whole", "None", "masked", "of one shape", "by key"],
)
def test_what_keeps_its_place_is_clipped_as_the_whole(strategy, params, part):
    assert_trained_as_whole(strategy, clip_a_part(part), params())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["zero1", "zero3"])
def test_the_state_may_begin_with_a_norm(strategy):
    def update(updates, norm, params=None):
        return jax.tree.map(lambda leaf: leaf / norm, updates), norm

    optimizer = optax.chain(optax.GradientTransformation(clipping.global_norm, update), optax.sgd(0.1))
    assert_trained_as_whole(strategy, optimizer, params_of())
