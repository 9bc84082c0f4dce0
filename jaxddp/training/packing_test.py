"""Packed operands: the program that comes out is the one of as many operands as there are arrays."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxddp
from jaxddp import targets
from jaxddp.communication import compression
from jaxddp.instruments.schedule import read_schedule
from jaxddp.models import SIZES, abstract, build
from jaxddp.training import packing

NUM_RANKS = 4
SMALL_MB = 0.005
STRATEGIES = {
    "bucketed": jaxddp.bucketed(SMALL_MB),
    "powersgd": jaxddp.bucketed(SMALL_MB, compression=compression.powersgd(2)),
    "zero1": jaxddp.zero1(SMALL_MB),
    "zero3": jaxddp.zero3(min_shard_elements=100),
}
IN_DEFAULT_RUN = ("bucketed", "zero3")  # each other strategy packs what one of these packs
every_strategy = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(one, id=name, marks=[] if name in IN_DEFAULT_RUN else pytest.mark.full)
        for name, one in STRATEGIES.items()
    ],
)


@pytest.fixture
def packed(monkeypatch):
    """Makes packs of the state of any model; the last of a kind is not full."""

    def pack(most=7):
        monkeypatch.setattr(packing, "FEW", 0)
        monkeypatch.setattr(packing, "PACK", most)

    return pack


def operations(text):
    """How often each operation occurs."""
    return collections.Counter(re.findall(r"^\s*(?:ROOT )?%?\S+ = \S+ ([a-z-]+)\(", text, re.MULTILINE))


def memory(program):
    analysis = program.memory_analysis()
    sizes = ("argument", "output", "alias", "temp")
    return {size: getattr(analysis, f"{size}_size_in_bytes") for size in sizes}


def as_numbers(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


@pytest.mark.sample
@every_strategy
def test_a_packed_step_is_the_step(strategy, packed):
    loss_fn, params = build("tiny")
    tokens = np.random.default_rng(0).integers(0, 64, (24, 17), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def compile_and_step():
        trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), strategy, jaxddp.data_mesh(NUM_RANKS))
        state = trainer.init(params)
        program = trainer.compile(state, batch)
        assert jaxddp.gradient_collectives(program) == sorted(trainer.planned(state, batch))
        return program, jax.block_until_ready(trainer.step(state, batch))

    expected, (expected_state, expected_metrics) = compile_and_step()
    packed()
    program, (state, metrics) = compile_and_step()
    assert operations(program.as_text()) == operations(expected.as_text()) != {}
    assert memory(program) == memory(expected)
    ours, theirs = (jax.tree.leaves(each) for each in ((state, metrics), (expected_state, expected_metrics)))
    assert [leaf.sharding for leaf in ours] == [leaf.sharding for leaf in theirs]
    for our, their in zip(map(as_numbers, ours), map(as_numbers, theirs), strict=True):
        np.testing.assert_array_equal(our, their)


@pytest.mark.parametrize(("most", "travel"), [(2, 5), (7, 2), (128, 1)])
def test_arrays_travel_in_packs(packed, most, travel):
    arrays = [jnp.full((2, 3), float(index)) for index in range(10)]
    mesh, whole = jaxddp.data_mesh(NUM_RANKS), PartitionSpec()

    def operands():
        run = packing.shard_map(lambda some: some, mesh=mesh, in_specs=(whole,), out_specs=whole)
        (equation,) = [each for each in jax.make_jaxpr(run)(arrays).eqns if each.primitive.name == "shard_map"]
        return len(equation.invars), len(equation.outvars)

    assert operands() == (10, 10)  # few enough
    packed(most)
    assert operands() == (travel, travel)


def mapped(function, in_specs, out_specs, *args):
    mesh = jaxddp.data_mesh(NUM_RANKS)
    run = packing.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(run)(*args)


@pytest.mark.parametrize("most", [2, 7, 128])
def test_arrays_of_every_kind_come_back_as_they_went_in(packed, most):
    packed(most)
    whole, by_last, by_first = PartitionSpec(), PartitionSpec(None, "data"), PartitionSpec("data")
    ins = {
        "scalars": [jnp.float32(index) for index in range(5)],
        "wide": [jnp.arange(6.0).reshape(2, 3) + index for index in range(9)],
        "others": [jnp.arange(4, dtype=jnp.int32), jnp.array([True, False]), jax.random.key(3), jnp.zeros((0, 3))],
        "shards": [jnp.arange(8.0 * count).reshape(1, 8 * count) for count in range(1, 5)],
        "rows": [jnp.arange(16.0).reshape(2, 8), jnp.arange(32.0).reshape(4, 8)],
        "batch": [jnp.arange(24.0).reshape(8, 3), jnp.arange(8.0)],
    }
    specs = {
        "scalars": whole, "wide": whole, "others": whole, "shards": by_last, "rows": by_last, "batch": by_first,
    }  # fmt: skip
    local = {}

    def keep(tree):
        local.update(jax.tree.map(jnp.shape, tree))
        return tree

    outs = mapped(keep, (specs,), specs, ins)
    assert jax.tree.structure(outs) == jax.tree.structure(ins)
    for ours, theirs in zip(jax.tree.leaves(outs), jax.tree.leaves(ins), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(as_numbers(ours), as_numbers(theirs))
    assert local["wide"] == [(2, 3)] * 9
    assert local["shards"] == [(1, 2), (1, 4), (1, 6), (1, 8)]
    assert local["rows"] == [(2, 2), (4, 2)]
    assert local["batch"] == [(2, 3), (2,)]


def test_numbers_come_back_as_arrays(packed):
    packed()
    outs = mapped(lambda x: (2.0 * x, 3, 0.5), (PartitionSpec(),), PartitionSpec(), jnp.ones(2))
    assert [leaf.tolist() for leaf in outs] == [[2.0, 2.0], 3, 0.5]


def test_each_rank_gets_its_own_shards(packed):
    packed()
    by_rank = PartitionSpec(None, "data")
    shards = [jnp.arange(8.0).reshape(1, 8) + 100 * index for index in range(3)]

    def tell(some):
        rank = jax.lax.axis_index("data")
        return [leaf + 1000 * rank for leaf in some]

    for ours, theirs in zip(mapped(tell, (by_rank,), by_rank, shards), shards, strict=True):
        np.testing.assert_array_equal(ours, theirs + 1000 * np.repeat(np.arange(4), 2))


@pytest.mark.full
@pytest.mark.parametrize("name", ["bucketed", "zero1"])
def test_a_gpu_program_copies_nothing_for_packs(name, packed):
    loss_fn, params = abstract("tiny")

    def compiled():
        trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), STRATEGIES[name], targets.mesh("h100:4"))
        tokens = jax.ShapeDtypeStruct((4 * trainer.num_ranks, SIZES["tiny"].context), jnp.int32)
        return trainer.compile(trainer.abstract_state(params), {"tokens": tokens, "targets": tokens})

    expected = compiled()
    packed()
    program = compiled()
    assert memory(program) == memory(expected)
    ours, theirs = read_schedule(program), read_schedule(expected)
    assert ours.gradient_collectives() == theirs.gradient_collectives()
    assert operations(program.as_text()) == operations(expected.as_text())


def test_the_state_of_a_model_of_48_layers_is_not_packed():
    assert len(jax.tree.leaves(abstract("seed_xl")[1])) * 3 < packing.FEW
