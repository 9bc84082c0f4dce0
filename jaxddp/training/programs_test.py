import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp

BATCH = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)


def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch @ params["up"] @ params["down"]))


def params_of(width):
    rng = np.random.default_rng(width)
    return {"up": rng.normal(size=(8, width)).astype("f"), "down": rng.normal(size=(width, 1)).astype("f")}


def make():
    return jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.zero3(min_shard_elements=0), jaxddp.data_mesh(3))


def test_a_trainer_tells_states_of_several_models_apart_by_their_shards():
    trainer, alone = make(), {width: make() for width in (5, 9)}
    states = {width: trainer.init(params_of(width)) for width in alone}
    expected = {width: trainer.init(params_of(width)) for width, trainer in alone.items()}
    trainer.abstract_state(params_of(20))
    for _ in range(2):
        for width in alone:
            assert trainer.planned(states[width], BATCH) == alone[width].planned(expected[width], BATCH)
            states[width], _ = trainer.step(states[width], BATCH)
            expected[width], _ = alone[width].step(expected[width], BATCH)
            found = trainer.params(states[width])
            jax.tree.map(np.testing.assert_array_equal, found, alone[width].params(expected[width]))


def test_a_model_of_which_the_shards_of_another_might_be_is_refused():
    trainer = make()
    state = trainer.init(params_of(5))
    transposed = jax.tree.map(jnp.transpose, params_of(5))
    for describe in (trainer.abstract_state, trainer.init):
        with pytest.raises(
            ValueError,
            match=r"^parameter 'down' \(=\(1, 5\)\) cannot be told by its shards from that of another model of this "
            r"trainer \(=\(5, 1\)\): make a Trainer for each$",
        ):
            describe(transposed)
    trainer.step(trainer.step(state, BATCH)[0], BATCH)
    make().abstract_state(transposed)
