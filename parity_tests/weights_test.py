"""Weights that jaxddp trained in shards, checkpointed and exported load into torchref."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import jaxddp
import torchref.interop
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.checkpoint.interop import from_numpy, to_numpy
from jaxddp.checkpoint.weights import load_weights
from jaxddp.models.toy_test import build
from torchref.models.toy_test import build as build_in_torch, loss_fn as loss_in_torch


def test_a_checkpoint_continues_in_torch(tmp_path):
    with jax.enable_x64(True):
        loss_fn, params = build("toy")
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        rng = np.random.default_rng(0)
        batch = {"x": rng.normal(size=(8, 10)), "y": rng.normal(size=(8, 5))}
        on_4 = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.zero3(min_shard_elements=0), jaxddp.data_mesh(4))
        on_1 = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.naive(), jaxddp.data_mesh(1))
        state, _ = on_4.step(on_4.init(params), batch)
        with Checkpoints(tmp_path / "checkpoints") as checkpoints:
            checkpoints.save(on_4, state)
            state, _ = checkpoints.restore(on_1, params)
        np.savez(tmp_path / "weights.npz", **to_numpy(on_1.params(state)))
        expected = float(on_1.evaluate(state, batch))

        module = torchref.interop.from_numpy(load_weights(tmp_path / "weights.npz"), build_in_torch("toy").double())
        loss = loss_in_torch(module, {name: torch.from_numpy(array) for name, array in batch.items()})
        assert abs(loss.item() - expected) < 1e-12  # float64, the frameworks sum in another order
        assert expected < float(loss_fn(params, batch)) - 0.01

        np.savez(tmp_path / "back.npz", **torchref.interop.to_numpy(module))
        jax.tree.map(
            np.testing.assert_array_equal, from_numpy(load_weights(tmp_path / "back.npz"), params), on_1.params(state)
        )
