"""``lax.reshape`` with ``dimensions`` moves elements even where the shape stays: an optimizer may not shard with it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jaxddp


def transposing(transpose):
    def update(updates, state, params=None):
        del params
        return jax.tree.map(transpose, updates), state

    return optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(0.1))


@pytest.mark.parametrize("strategy", [jaxddp.zero1(), jaxddp.zero3(min_shard_elements=0)], ids=["zero1", "zero3"])
def test_it_is_refused_on_square_matrices(strategy):
    optimizer = transposing(lambda g: lax.reshape(g, g.shape, (1, 0)))
    trainer = jaxddp.Trainer(lambda params, batch: 0.0, optimizer, strategy, jaxddp.data_mesh(2))
    with pytest.raises(ValueError, match="optimizer must be element-wise to be sharded: .*reshape"):
        trainer.init({"w": jnp.ones((4, 4))})


def test_a_reshape_in_order_is_no_change():
    optimizer = transposing(lambda g: lax.reshape(g, g.shape, tuple(range(g.ndim))))
    trainer = jaxddp.Trainer(lambda params, batch: 0.0, optimizer, jaxddp.zero1(), jaxddp.data_mesh(2))
    trainer.init({"w": jnp.ones((4, 4))})
