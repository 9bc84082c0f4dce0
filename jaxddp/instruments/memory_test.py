"""Formula, layout and compiled program agree about what lives across steps, at every stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp import targets
from jaxddp.comparison_test import refusal
from jaxddp.instruments.inspect import DeviceBytes, held_bytes, step_memory

COUNT_BYTES = 4  # optax's own, of steps
STEP_AND_KEY_BYTES = 4 + 8
# No size is a multiple of a number of ranks here, so every cut leaf is padded; zero3 leaves the smallest two whole.
SHAPES = {"up": (7, 13), "bias": (13,), "down": (13, 5), "scale": (), "stack": (3, 13, 13)}
STAGES = {
    "bucketed": jaxddp.bucketed(),
    "zero1": jaxddp.zero1(),
    "zero2": jaxddp.zero2(),
    "zero3": jaxddp.zero3(min_shard_elements=20),
}
CASES = [(2, "bucketed"), (8, "zero1"), (3, "zero2"), (8, "zero3"), ("h100:64", "zero3"), ("h100:2", "zero1")]


def loss_fn(params, batch):
    x = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    for square in params["stack"]:
        x = jnp.tanh(x @ square) * params["scale"]
    return jnp.mean((x @ params["down"] - batch["y"]) ** 2)


def inputs(devices, strategy, optimizer=optax.adamw(1e-3)):  # noqa: B008
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    mesh = targets.mesh(devices) if isinstance(devices, str) else jaxddp.data_mesh(devices)
    trainer = jaxddp.Trainer(loss_fn, optimizer, strategy, mesh)
    examples = 3 * trainer.num_ranks
    batch = {name: jax.ShapeDtypeStruct((examples, width), jnp.float32) for name, width in (("x", 7), ("y", 5))}
    return trainer, trainer.abstract_state(params), batch, params


def padded(shape, num_ranks):
    return -(-int(np.prod(shape)) // num_ranks)


@pytest.mark.parametrize(("devices", "name"), CASES)
def test_layouts_are_what_compiled_steps_take(devices, name):
    trainer, state, batch, params = inputs(devices, STAGES[name])
    program = trainer.compile(state, batch)
    memory, held, ranks = step_memory(program, state), held_bytes(trainer.layout(state)), trainer.num_ranks
    whole = sum(leaf.size for leaf in params.values())
    cut = {"zero3": ("up", "down", "stack")}.get(name, tuple(params) if name != "bucketed" else ())
    elements = sum(padded(shape, ranks if leaf in cut else 1) for leaf, shape in SHAPES.items())
    assert held.optimizer_state == 8 * elements + COUNT_BYTES
    assert held.parameters == 4 * (elements if name == "zero3" else whole)
    batch_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(batch)) // ranks
    assert memory[:4] == (*held[:2], STEP_AND_KEY_BYTES, batch_bytes)
    stats = program.memory_analysis()
    assert stats.argument_size_in_bytes == sum(memory[:3]) + batch_bytes + memory.padding
    assert memory.temporaries == stats.temp_size_in_bytes


def test_a_model_state_is_among_the_others():
    state = jaxddp.TrainState(*(jax.ShapeDtypeStruct((size,), jnp.float32) for size in (1, 2, 3, 4)))
    extra = state._replace(model_state=jax.ShapeDtypeStruct((8,), jnp.float32))

    def step(state, batch):
        return jax.tree.map(lambda leaf: leaf + batch.sum(), state)

    program = jax.jit(step).lower(extra, jax.ShapeDtypeStruct((5,), jnp.float32)).compile()
    found = DeviceBytes(parameters=8, optimizer_state=12, others=4 * (1 + 4 + 8))
    assert step_memory(program, extra)[:3] == found[:3]


def test_a_program_of_another_state_is_refused():
    program = jax.jit(lambda x: x + 1).lower(1.0).compile()
    state = jaxddp.TrainState(*(jax.ShapeDtypeStruct((), jnp.float32) for _ in range(4)))
    assert "takes 1 arguments and the state has 4 leaves" in refusal(step_memory, program, state)


@pytest.mark.parametrize("name", ["bucketed", "zero1", "zero3"])
def test_what_a_step_does_not_read_is_held_and_counted_all_the_same(name):
    """Hyperparameters with a schedule of their own: those and a part of the batch are no arguments of the program."""
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 9))
    trainer, state, batch, _ = inputs(2, STAGES[name], optimizer)
    batch["unread"] = jax.ShapeDtypeStruct((6, 100), jnp.float32)
    found, expected = step_memory(trainer.compile(state, batch), state), held_bytes(trainer.layout(state))
    assert found[:3] == (*expected[:2], STEP_AND_KEY_BYTES)
