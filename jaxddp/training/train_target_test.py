"""The trainer on meshes of targets: it plans and compiles, and what needs devices is refused."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp import targets
from jaxddp.models import abstract, build

BUCKETED = jaxddp.bucketed(0.0005)  # two buckets


def make(mesh, strategy=BUCKETED, **options):
    loss_fn, params = abstract("toy")
    return jaxddp.Trainer(loss_fn, optax.adamw(1e-3), strategy, mesh, **options), params


def batch_of(num_examples):
    return {name: jax.ShapeDtypeStruct((num_examples, width), jnp.float32) for name, width in (("x", 10), ("y", 5))}


def compile_on(spec):
    trainer, params = make(targets.mesh(spec))
    state, batch = trainer.abstract_state(params), batch_of(2 * trainer.num_ranks)
    program = trainer.compile(state, batch)
    assert trainer.compile(state, batch) is program
    return trainer.planned(state, batch), jaxddp.gradient_collectives(program), program


@pytest.fixture(scope="module")
def compiled():
    specs = ("h100:8", "v5p:8")
    with ThreadPoolExecutor() as pool:
        return dict(zip(specs, pool.map(compile_on, specs), strict=True))


@pytest.mark.parametrize("spec", ["h100:8", "v5p:8"])
def test_planned_is_compiled_and_the_state_is_updated_in_place(compiled, spec):
    planned, found, program = compiled[spec]
    assert len(planned) > 1
    assert sorted(found) == sorted(planned)
    memory = program.memory_analysis()
    params_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(abstract("toy")[1]))
    assert memory.alias_size_in_bytes >= 3 * params_bytes  # with the two moments of Adam


@pytest.mark.parametrize("strategy", [jaxddp.naive(), jaxddp.flat(), jaxddp.overlapped(), BUCKETED])
def test_the_plan_is_that_of_as_many_devices(strategy):
    there, params = make(targets.mesh("h100:8"), strategy)
    here, _ = make(jaxddp.data_mesh(8), strategy)
    batch = batch_of(16)
    assert there.plan(there.abstract_state(params), batch) == here.plan(here.abstract_state(params), batch)


def test_an_abstract_state_is_that_of_init():
    loss_fn, params = build("toy")
    frozen = {"trainable": lambda name: "up" not in name}
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), jaxddp.flat(), jaxddp.data_mesh(2), **frozen)
    state = trainer.init(params)
    described = trainer.abstract_state(params)
    assert jax.tree.structure(described) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(described), jax.tree.leaves(state), strict=True):
        assert isinstance(ours, jax.ShapeDtypeStruct)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    with pytest.raises(ValueError, match="must hold at least one array"):
        trainer.abstract_state({})


def test_what_needs_devices_is_refused():
    trainer, params = make(targets.mesh("h100:2x8"))
    state, batch = trainer.abstract_state(params), batch_of(16)
    with pytest.raises(ValueError, match=r"^init needs devices, and 'h100:2x8' is not here: use abstract_state$"):
        trainer.init(params)
    for method in (trainer.step, trainer.evaluate):
        name = method.__name__
        with pytest.raises(ValueError, match=rf"^{name} needs devices, and 'h100:2x8' is not here: use compile$"):
            method(state, batch)
    with pytest.raises(ValueError, match=r"batch \(=15 examples\) must be divisible by num_ranks x num_microbatches"):
        trainer.compile(state, batch_of(15))
