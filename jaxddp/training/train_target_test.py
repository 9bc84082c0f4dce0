"""The trainer on meshes of targets: it plans and compiles, and what needs devices is refused."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxddp
from jaxddp import targets
from jaxddp.communication.buckets import TensorSpec
from jaxddp.comparison_test import compiled_as_planned, mostly_full, planned_collectives, refusal
from jaxddp.instruments.targets import start_compile_for_target
from jaxddp.models.toy_test import abstract, build

BUCKETED = jaxddp.bucketed(0.0005)  # two buckets


def make(mesh, strategy=BUCKETED, **options):
    loss_fn, params = abstract("toy")
    return jaxddp.Trainer(loss_fn, optax.adamw(1e-3), strategy, mesh, **options), params


def batch_of(num_examples):
    return {name: jax.ShapeDtypeStruct((num_examples, width), jnp.float32) for name, width in (("x", 10), ("y", 5))}


@pytest.mark.parametrize("spec", ["h100:8", "v5p:8"])
def test_planned_is_compiled_and_the_state_is_updated_in_place(spec):
    trainer, params = make(targets.mesh(spec))
    state, batch = trainer.abstract_state(params), batch_of(2 * trainer.num_ranks)
    program = trainer.compile(state, batch)
    assert trainer.compile(state, batch) is program
    assert len(compiled_as_planned(trainer, state, batch)) > 1
    params_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    assert program.memory_analysis().alias_size_in_bytes >= 3 * params_bytes  # with the two moments of Adam


@pytest.mark.parametrize("strategy", [jaxddp.naive(), jaxddp.flat(), jaxddp.overlapped(), BUCKETED])
def test_the_plan_is_that_of_as_many_devices(strategy):
    there, params = make(targets.mesh("h100:8"), strategy)
    here, _ = make(jaxddp.data_mesh(8), strategy)
    batch = batch_of(16)
    assert there.plan(there.abstract_state(params), batch) == here.plan(here.abstract_state(params), batch)


def test_an_abstract_state_is_that_of_init():
    trainer, _ = make(jaxddp.data_mesh(2), jaxddp.flat(), trainable=lambda name: "up" not in name)
    _, params = build("toy")
    state = trainer.init(params)
    described = trainer.abstract_state(params)
    assert jax.tree.structure(described) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(described), jax.tree.leaves(state), strict=True):
        assert isinstance(ours, jax.ShapeDtypeStruct)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert "must hold at least one array" in refusal(trainer.abstract_state, {})


def test_what_needs_devices_is_refused(tmp_path):
    trainer, params = make(targets.mesh("h100:2x8"))
    state, batch = trainer.abstract_state(params), batch_of(16)
    assert "init needs devices, and 'h100:2x8' is not here" in refusal(trainer.init, params)
    for method in (trainer.step, trainer.evaluate):
        assert f"{method.__name__} needs devices, and 'h100:2x8' is not here" in refusal(method, state, batch)
    assert "restore needs devices" in refusal(jaxddp.Checkpoints(tmp_path).restore, trainer, params)
    assert "batch (=15 examples)" in refusal(trainer.compile, state, batch_of(15))


OWN_LOOPS = (jaxddp.bucketed(3e-4), jaxddp.naive(), jaxddp.flat(), jaxddp.overlapped())
SHAPES = {"up": (8, 12), "down": (12, 1), "bias": (1,), "linear": (40,), "unused": (3,)}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]) ** 2) + params["linear"].sum()


@pytest.mark.parametrize("strategy", mostly_full(OWN_LOOPS[:1], OWN_LOOPS))
@pytest.mark.parametrize("spec", ["h100:8", pytest.param("v5p:8", marks=pytest.mark.full)])
def test_value_and_grad_compiles_to_what_is_planned(spec, strategy):
    mesh, platform = targets.mesh(spec), targets.target(spec).platform
    args = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}, jnp.ones((16, 8))
    step = jax.shard_map(jaxddp.value_and_grad(loss_fn, strategy), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    program = start_compile_for_target(
        step, args, compiler_options=jaxddp.compile_options(strategy, platform),
        in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))),
    ).result()  # fmt: skip
    in_order = [TensorSpec(name, SHAPES[name], "float32") for name in ("linear", "bias", "down", "up")]
    planned = planned_collectives(strategy, strategy.plan(in_order), 8, platform)
    assert sorted(jaxddp.gradient_collectives(program)) == sorted(planned)
