"""What a step does not read is no argument of its program: what is held is counted all the same, under its own name."""

import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp.instruments.memory import held_bytes, step_memory


@pytest.mark.parametrize("name", ["bucketed", "zero1", "zero3"])
def test_injected_hyperparameters_with_a_schedule(name):
    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 9))
    options = {"min_shard_elements": 0} if name == "zero3" else {}
    trainer = jaxddp.Trainer(loss_fn, optimizer, jaxddp.make_strategy(name, **options), jaxddp.data_mesh(2))
    state = trainer.init({"w": jnp.ones((6, 6))})
    batch = {"x": jnp.ones((8, 6)), "unread": jnp.ones((8, 100))}
    found = step_memory(trainer.compile(state, batch), state)
    expected = held_bytes(trainer.layout(state))
    assert (found.parameters, found.optimizer_state) == (expected.parameters, expected.optimizer_state)
    assert found.others == 4 + 8  # the step's number and the key
