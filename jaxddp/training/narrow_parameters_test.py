"""Parameters of 16 bits lose updates that are smaller than half their last place: a trainer warns of it."""

import warnings

import jax.numpy as jnp
import optax
import pytest

import jaxddp


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2).astype(jnp.float32)


@pytest.mark.parametrize(("name", "dtype"), [("bucketed", "bfloat16"), ("zero3", "float16")])
def test_init_warns(name, dtype):
    strategy = jaxddp.make_strategy(name)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(2), grad_dtype=jnp.float32)
    with pytest.warns(UserWarning, match=rf"parameter 'w' is {dtype}.*float32 .*compute_dtype=jnp.{dtype}$"):
        trainer.init({"w": jnp.ones((3, 2), dtype)})


def test_masters_and_frozen_ones_are_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"compute_dtype": jnp.bfloat16}
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.zero1(), jaxddp.data_mesh(2), **options)
        trainer.init({"w": jnp.ones((3, 2))})
        trainer = jaxddp.Trainer(
            loss_fn, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh(2), trainable=lambda name: name == "v"
        )
        trainer.init({"w": jnp.ones((3, 2), jnp.bfloat16), "v": jnp.ones(3)})
