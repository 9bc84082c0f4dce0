"""What stages 1 and 2 compile to on 8 H100s and 8 TPU v5p that are not here."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxddp
from jaxddp import targets
from jaxddp.communication.collectives import reduce_scatter
from jaxddp.communication.planned import planned_exchange
from jaxddp.comparison_test import mostly_full
from jaxddp.instruments.schedule import read_schedule
from jaxddp.instruments.simulate import simulate
from jaxddp.network import Network

NUM_LAYERS, WIDTH = 8, 1024
PARAMS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * NUM_LAYERS  # 4 MiB each, a bucket each
BATCH = {"x": jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)}
MIB = 2**20


def loss_fn(params, batch):
    x = batch["x"]
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return jnp.mean(x**2)


STEPS = {
    "bucketed": (jaxddp.bucketed(4), "h100:8", 1),
    "zero1": (jaxddp.zero1(4), "h100:8", 1),
    "zero2": (jaxddp.zero2(4), "h100:8", 1),
    "zero2, 4 micro-batches": (jaxddp.zero2(4), "h100:8", 4),
    "zero1, 4 micro-batches": (jaxddp.zero1(4), "h100:8", 4),
    "zero1 by leaves": (jaxddp.zero1(4, shard="leaves"), "h100:8", 1),
    "zero1 on TPUs": (jaxddp.zero1(4), "v5p:8", 1),
    "zero1 by leaves on TPUs": (jaxddp.zero1(4, shard="leaves"), "v5p:8", 1),
}


@pytest.fixture(scope="module")
def steps():
    @functools.cache
    def compiled(name):
        strategy, spec, num = STEPS[name]
        trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), strategy, targets.mesh(spec), num_microbatches=num)
        state = trainer.abstract_state(PARAMS)
        pending = targets.start_compile(trainer, state, BATCH)
        return trainer.planned(state, BATCH), read_schedule(pending.result())

    return compiled


@pytest.mark.parametrize("name", mostly_full(["zero2, 4 micro-batches"], STEPS))  # whose memory is looked at below
def test_compiled_is_planned(steps, name):
    planned, schedule = steps(name)
    assert schedule.gradient_collectives() == sorted(planned)
    kinds = {collective.kind for collective in schedule.collectives() if not collective.is_metrics}
    of_zero = {"reduce-scatter", "all-gather"} | ({"all-to-all"} if "leaves" in name else set())
    assert kinds == ({"all-reduce"} if name == "bucketed" else of_zero)
    # The last gradient's way to its owner has nothing to overlap with: XLA makes such collectives synchronous.
    assert all(c.is_async for c in schedule.collectives() if not c.is_metrics and c.kind != "all-to-all")


@pytest.mark.full
def test_a_scatter_of_many_tiles_stays_one_on_tpus():
    """XLA makes an all-reduce of rows of 7,425 tiles: no power of two divides them into few enough."""
    mesh, width = targets.mesh("v5p:8"), 7425 * 1024
    by_rank = PartitionSpec("data")
    scatter = functools.partial(reduce_scatter, axis="data")
    mapped = jax.shard_map(scatter, mesh=mesh, in_specs=by_rank, out_specs=by_rank, check_vma=False)
    rows = jax.ShapeDtypeStruct((64, width), jnp.float32, sharding=NamedSharding(mesh, by_rank))
    found = jaxddp.collectives(jaxddp.jit(mapped, jaxddp.zero1(), platform="tpu"), rows, target="v5p:8")
    assert found.pairs == [planned_exchange("reduce-scatter", 8 * width, "float32", 8, "tpu")]


@pytest.mark.full
def test_a_step_costs_no_more_than_with_all_reduces(steps):
    chip, network = targets.target("h100:8").chip, Network(50)
    bucketed, zero1 = (simulate(steps(name)[1], chip, network).step_s for name in ("bucketed", "zero1"))
    assert zero1 <= 1.01 * bucketed


@pytest.mark.full
def test_stage_1_and_2_are_one_program_without_micro_batches(steps):
    one, two = (steps(name)[1] for name in ("zero1", "zero2"))
    assert [operation.name for operation in one.operations] == [operation.name for operation in two.operations]
    chip, network = targets.target("h100:8").chip, Network(50)
    assert simulate(one, chip, network).step_s == simulate(two, chip, network).step_s


def test_no_whole_gradient_outlives_its_bucket(steps):
    shards = steps("zero2, 4 micro-batches")[1].memory.temp_size_in_bytes
    gradients = NUM_LAYERS * 4 * MIB
    activations = NUM_LAYERS * (1024 // 8 // 4) * WIDTH * 4
    # The shards, three buckets (one fills, two are in flight or being unpacked) as whole gradient and as buffer, and as
    # much again in slack for what the compiler holds between.
    assert shards < gradients / 8 + 2 * 3 * 4 * MIB + activations + 4 * MIB


@pytest.mark.full
def test_whole_gradients_take_more(steps):
    shards, whole = (steps(f"{name}, 4 micro-batches")[1].memory.temp_size_in_bytes for name in ("zero2", "zero1"))
    assert whole > NUM_LAYERS * 4 * MIB
    assert shards < whole
