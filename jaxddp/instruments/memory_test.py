"""Formula, layout and compiled program agree to the byte about what lives across steps, at every stage."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp import targets
from jaxddp.instruments.memory import (
    DeviceBytes,
    allocated_bytes,
    held_bytes,
    padding_share,
    state_formula,
    step_memory,
)
from jaxddp.layout import Leaf
from jaxddp.models import SIZES
from jaxddp.planning.cost.memory import PerParameter
from jaxddp.planning.cost.workload import transformer
from jaxddp.strategy import Ranks
from jaxddp.zero import shards

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
CPUS = [(2, "bucketed"), (8, "zero1"), (3, "zero2"), (8, "zero3")]
GPUS = [("h100:2", "zero1"), ("h100:8", "bucketed"), ("h100:64", "zero3")]  # without micro-batches zero2 is zero1


def loss_fn(params, batch):
    x = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    for square in params["stack"]:
        x = jnp.tanh(x @ square) * params["scale"]
    return jnp.mean((x @ params["down"] - batch["y"]) ** 2)


def inputs(mesh, strategy):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), strategy, mesh)
    examples = 3 * trainer.num_ranks
    batch = {name: jax.ShapeDtypeStruct((examples, width), jnp.float32) for name, width in (("x", 7), ("y", 5))}
    return trainer, trainer.abstract_state(params), batch, params


def check(trainer, state, batch, params, program):
    memory, held = step_memory(program, state), held_bytes(trainer.layout(state))
    formula = state_formula(params, trainer.strategy, trainer.num_ranks)
    assert (held.parameters, held.optimizer_state) == (formula.parameters, formula.optimizer_state + COUNT_BYTES)
    assert memory.after_init == DeviceBytes(held.parameters, held.optimizer_state, STEP_AND_KEY_BYTES)
    batch_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(batch)) // trainer.num_ranks
    assert memory.before_update.batch == memory.after_step.batch == batch_bytes
    assert program.memory_analysis().argument_size_in_bytes == memory.after_init.total + batch_bytes
    for moment in (memory.before_update, memory.after_step):
        assert moment.state == memory.after_init.total
        assert moment.total - moment.state - batch_bytes <= memory.temporaries


@pytest.mark.parametrize(("num_ranks", "name"), CPUS)
def test_the_formula_is_what_compiled_steps_take_on_cpus(num_ranks, name):
    trainer, state, batch, params = inputs(jaxddp.data_mesh(num_ranks), STAGES[name])
    check(trainer, state, batch, params, trainer.compile(state, batch))


@pytest.fixture(scope="module")
def on_gpus():
    """Steps under compilation, as many at a time as there are CPUs."""
    steps = {case: inputs(targets.mesh(case[0]), STAGES[case[1]]) for case in GPUS}
    return {case: (*step, targets.start_compile(*step[:3])) for case, step in steps.items()}


@pytest.mark.parametrize("case", GPUS, ids=" ".join)
def test_the_formula_is_what_compiled_steps_take_on_gpus(on_gpus, case):
    trainer, state, batch, params, pending = on_gpus[case]
    check(trainer, state, batch, params, pending.result())


def layout_of(params, optimizer, strategy, num_ranks):
    leaves = jax.tree.map(lambda leaf: Leaf(leaf.shape, leaf.dtype), params)
    return strategy.layout(leaves, optax.with_extra_args_support(optimizer), Ranks("data", num_ranks, num_ranks))


def layouts_of(model, name, ranks, monkeypatch):
    """Lays the state of a model of the zoo out over each of some numbers of ranks."""
    # Whether an optimizer may be cut takes a second to find out, and does not depend on the number of ranks.
    monkeypatch.setattr(shards, "check_elementwise", lambda *args, **kwargs: None)
    shapes = transformer(**dataclasses.asdict(SIZES[model])).tensors
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes}
    for num_ranks in ranks:
        yield num_ranks, params, layout_of(params, optax.adamw(1e-3), jaxddp.make_strategy(name), num_ranks)


@pytest.mark.parametrize("name", ["zero1", "zero3"])  # zero2's layout is zero1's, and stage 0 knows no ranks
def test_the_formula_is_the_layout_for_2_to_64_ranks_of_a_real_model(name, monkeypatch):
    total = SIZES["seed_xl"].num_params
    for num_ranks, params, layout in layouts_of("seed_xl", name, range(2, 65), monkeypatch):
        held, formula = held_bytes(layout), state_formula(params, jaxddp.make_strategy(name), num_ranks)
        assert (held.parameters, held.optimizer_state) == (formula.parameters, formula.optimizer_state + COUNT_BYTES)
        assert formula.optimizer_state >= 8 * total / num_ranks
        assert formula.gradients == (4 * total if name == "zero1" else formula.optimizer_state // 2)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
@pytest.mark.parametrize("model", ["seed_xl", "small", "medium", "large", "xl"])
def test_padding_is_under_a_thousandth(name, model, monkeypatch):
    for _, _, layout in layouts_of(model, name, (8, 64), monkeypatch):
        assert 0 <= padding_share(layout) < 1e-3


def test_padding_is_counted():
    """10 elements on 4 ranks are cut into 4 times 3; what is whole has none."""
    params = {"w": jax.ShapeDtypeStruct((2, 5), jnp.float32)}
    assert padding_share(layout_of(params, optax.adam(1e-3), jaxddp.zero1(), 4)) == pytest.approx(0.2)
    assert padding_share(layout_of(params, optax.adam(1e-3), jaxddp.flat(), 4)) == 0


def test_the_state_of_real_arrays_is_what_the_layout_says():
    trainer, _, _, params = inputs(jaxddp.data_mesh(8), STAGES["zero3"])
    state = trainer.init(jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), params))
    held = held_bytes(trainer.layout(state))
    for device in jax.devices():
        trees = {"parameters": state.params, "optimizer_state": state.opt_state}
        for name, tree in trees.items():
            shards = [shard.data for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
            assert sum(data.nbytes for data in shards if data.device == device) == getattr(held, name)


def test_other_bytes_per_parameter():
    params = {"w": jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)}
    mixed = PerParameter(2, 2, 12, accumulator=4)
    assert state_formula(params, jaxddp.zero2(), 4, mixed) == (32, 24, 48)
    assert state_formula(params, jaxddp.zero2(accumulate="full"), 4, mixed) == (32, 96, 48)  # the program of zero1


def test_a_model_state_is_among_the_others():
    state = jaxddp.TrainState(*(jax.ShapeDtypeStruct((size,), jnp.float32) for size in (1, 2, 3, 4)))
    extra = state._replace(model_state=jax.ShapeDtypeStruct((8,), jnp.float32))

    def step(state, batch):
        return jax.tree.map(lambda leaf: leaf + batch.sum(), state)

    program = jax.jit(step).lower(extra, jax.ShapeDtypeStruct((5,), jnp.float32)).compile()
    others = 4 * (1 + 4 + 8)
    assert step_memory(program, extra).after_init == DeviceBytes(parameters=8, optimizer_state=12, others=others)


def test_a_program_of_another_state_is_refused():
    program = jax.jit(lambda x: x + 1).lower(1.0).compile()
    state = jaxddp.TrainState(*(jax.ShapeDtypeStruct((), jnp.float32) for _ in range(4)))
    with pytest.raises(
        ValueError, match=r"^the program takes 1 arguments and the state has 4 leaves: it must be a step"
    ):
        step_memory(program, state)


def test_cpus_count_no_allocations():
    assert allocated_bytes(jax.devices()[0]) is None
