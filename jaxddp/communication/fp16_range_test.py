"""fp16 gradients are divided before they are cast: what has a mean below 65504 arrives, whatever it is the sum of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxddp
from jaxddp.communication import compression

STRATEGIES = ["naive", "flat", "overlapped", "bucketed", "zero1", "zero2"]


def run(loss_fn, strategy, batch, num_microbatches=1):
    made = jaxddp.make_strategy(strategy, compression=compression.fp16)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), made, jaxddp.data_mesh(2), num_microbatches=num_microbatches)
    state, _ = trainer.step(trainer.init({"w": jnp.zeros(3)}), batch)
    return -trainer.params(state)["w"]


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mean_over_microbatches(strategy, num_microbatches):
    def loss_fn(params, batch):
        return jnp.mean(batch["x"]) * jnp.sum(params["w"])

    found = run(loss_fn, strategy, {"x": jnp.full((8,), 3e4)}, num_microbatches)
    np.testing.assert_allclose(found, np.full(3, 3e4), rtol=1e-3)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sum_over_tokens(strategy, num_microbatches):
    def loss_fn(params, batch):
        return jaxddp.Weighted(jnp.sum(batch["x"]) * jnp.sum(params["w"]), jnp.sum(batch["x"]))

    found = run(loss_fn, strategy, {"x": jnp.ones((400_000,))}, num_microbatches)
    np.testing.assert_allclose(found, np.ones(3), rtol=1e-3)


def test_a_denominator_of_ones_own():
    plan = jaxddp.plan_buckets([jaxddp.TensorSpec("w", (3,), "float32")])

    def mean(x):
        grads = {"w": jnp.full(3, 1e6) * x[0]}
        return jaxddp.sync_gradients(grads, plan, "data", denominator=400.0, compression=compression.fp16)

    found = jax.shard_map(mean, mesh=jaxddp.data_mesh(2), in_specs=P("data"), out_specs=P())(jnp.ones(2))
    np.testing.assert_allclose(found["w"], np.full(3, 5e3), rtol=1e-3)
