import jax
import numpy as np
import optax

import jaxddp
from jaxddp.checkpoint.host_state import host_params
from jaxddp.checkpoint.interop import from_numpy, to_numpy
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
    jax.tree.map(np.testing.assert_array_equal, from_numpy(np.load(tmp_path / "weights.npz"), params), params)
    trainer.step(state, {"x": np.zeros((3, 10)), "y": np.zeros((3, 5))})
    jax.tree.map(np.testing.assert_array_equal, on_host, params)  # a step that is given the state leaves them alone
    assert "was donated to an earlier step" in refusal(host_params, trainer, state)
