"""A user's program for type checkers, which know every public name from the packages' own files; it is never run."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import jaxddp
import torchref


def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    """The mean square of a linear model."""
    return jnp.mean((batch @ params["w"]) ** 2)


def main() -> None:
    """Trains a step, and asks what it sends."""
    strategy = assert_type(jaxddp.zero1(bucket_mb=25), jaxddp.Strategy)
    trainer = jaxddp.Trainer(loss_fn, optax.adam(1e-3), strategy, jaxddp.data_mesh(4))
    batch = jnp.ones((8, 3))
    state = assert_type(trainer.init({"w": jnp.zeros((3, 1))}), jaxddp.TrainState)
    state, metrics = trainer.step(state, batch)
    print(metrics["loss"], jaxddp.flax.from_nnx, jaxddp.network.measured("h100:8"))
    assert_type(jaxddp.collectives(trainer.step, state, batch).pairs, list[tuple[str, int]])
    assert_type(jaxddp.targets.mesh("h100:8"), jax.sharding.AbstractMesh)
    assert_type(jaxddp.parity.check(loss_fn, optax.sgd(0.1), state.params, [batch, batch]), list[jaxddp.parity.Result])
    assert_type(torchref.plan_buckets([], 25), jaxddp.BucketPlan)
    jaxddp.no_such_name  # type: ignore[attr-defined]  # noqa: B018
