"""Parameters whose name is "": one array, or the key "" of a dictionary. Their optimizer state is sharded as any."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint import Checkpoints

STRATEGIES = {"zero1": {}, "zero2": {}, "zero3": {"min_shard_elements": 0}}


def loss_of(array):
    return lambda params, batch: jnp.mean((batch["x"] @ array(params) - batch["y"]) ** 2)


MODELS = {
    "array": (lambda w: w, loss_of(lambda params: params)),
    "empty key": (lambda w: {"": w}, loss_of(lambda params: params[""])),
}


def batches(num):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(12, 4)), "y": rng.normal(size=(12, 2))} for _ in range(num)]


@pytest.mark.sample
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("model", "compute_dtype"), [("array", None), ("empty key", None), ("array", "float64")])
def test_a_checkpoint_holds_the_moments_of_all_ranks(name, model, compute_dtype, tmp_path):
    make, loss_fn = MODELS[model]
    with jax.enable_x64(True):
        params = make(jnp.asarray(np.random.default_rng(1).normal(size=(4, 2))))

        def trainer(name, num_ranks, **options):
            strategy = jaxddp.make_strategy(name, **options)
            mesh = jaxddp.data_mesh(num_ranks)
            return jaxddp.Trainer(loss_fn, optax.adam(0.1), strategy, mesh, compute_dtype=compute_dtype)

        alone = trainer("naive", 1)
        expected = alone.init(params)
        for batch in batches(6):
            expected, _ = alone.step(expected, batch)

        saves, goes_on = trainer(name, 4, **STRATEGIES[name]), trainer("naive", 2)
        state = saves.init(params)
        for batch in batches(6)[:3]:
            state, _ = saves.step(state, batch)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(saves, state)
            alone_restored = checkpoints.restore_params(params)
            state, _ = checkpoints.restore(goes_on, params)
        assert jax.tree.all(jax.tree.map(np.array_equal, alone_restored, goes_on.params(state)))
        for batch in batches(6)[3:]:
            state, _ = goes_on.step(state, batch)
        for found, right in zip(
            jax.tree.leaves(goes_on.params(state)), jax.tree.leaves(alone.params(expected)), strict=True
        ):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-12)
