import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.host_state import host_params
from jaxddp.checkpoint.interop import from_numpy, to_numpy
from jaxddp.checkpoint.weights import load_weights
from jaxddp.comparison_test import refusal
from jaxddp.models.toy_test import build


def test_shards_come_to_the_host_without_a_whole_on_any_device_and_back_from_a_file(tmp_path):
    loss_fn, params = build("toy")
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.zero3(min_shard_elements=8), jaxddp.data_mesh(3))
    state = trainer.init(params)
    largest = max(leaf.on_rank.size for leaf in jax.tree.leaves(trainer.layout(state).params))
    before = {id(array) for array in jax.live_arrays()}
    on_host = host_params(trainer, state)
    assert all(array.size <= largest for array in jax.live_arrays() if id(array) not in before)
    np.savez(tmp_path / "weights.npz", **to_numpy(on_host))
    jax.tree.map(np.testing.assert_array_equal, from_numpy(load_weights(tmp_path / "weights.npz"), params), params)
    trainer.step(state, {"x": np.zeros((3, 10)), "y": np.zeros((3, 5))})
    jax.tree.map(np.testing.assert_array_equal, on_host, params)  # a step that is given the state leaves them alone
    assert "was donated to an earlier step" in refusal(host_params, trainer, state)


def test_what_is_no_whole_file_of_weights_is_refused_in_one_line(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, w=jnp.arange(100.0), v=jnp.ones(3))
    content = path.read_bytes()
    middle = content[:300] + bytes([content[300] ^ 1]) + content[301:]
    pickled, alone, packed = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez_compressed(packed, w=np.arange(100.0))
    np.savez(pickled, w=np.array([{}], object))
    np.save(alone, np.ones(3))
    others = [stream.getvalue() for stream in (pickled, alone)]
    others.append(packed.getvalue()[:50] + b"\xff" * 20 + packed.getvalue()[70:])
    for damaged in (content[: len(content) // 2], content[:-1], b"", b"text", middle, *others):
        path.write_bytes(damaged)
        assert "weights.npz' must hold weights, " in refusal(load_weights, path)
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path / "none.npz")
