"""What arrives is divided, taken apart and its squares summed, with few sums where a bucket's tensors are small."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxddp
from jaxddp.communication import buffers, reduction
from jaxddp.communication.buckets import TensorSpec, plan_buckets, plan_per_tensor
from jaxddp.communication.compression import none
from jaxddp.communication.reduction import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    SMALL,
    Reduction,
    finish_reduction,
    start_reduction,
)

pytestmark = pytest.mark.smoke

NUM_RANKS, DENOMINATOR = 4, 8.0
SIZES = {
    "one": [5],
    "two small": [3, 7],
    "many small": [3, 1, 6, 8, 2, 9],
    "many at the limit": [SMALL - 2, SMALL, SMALL + 2],
    "many large": [SMALL, SMALL + 1, SMALL, SMALL],
}


def arrived(sizes, reduce):
    """A plan of one bucket, the tensors whose sums over ranks have arrived in it, and those sums."""
    specs = [TensorSpec(f"t{index}", (size,), "float32") for index, size in enumerate(sizes)]
    plan = plan_buckets(specs, None)
    values = np.random.default_rng(0)
    tensors = {spec.name: jnp.asarray(values.normal(size=spec.shape), jnp.float32) for spec in specs}
    buffer = reduce.pack(plan.buckets[0], tensors, NUM_RANKS)
    # The last rank's part is the one that is padded.
    return plan, tensors, Reduction((buffer[-1] if reduce is REDUCE_SCATTER else buffer,), {}, jnp.int32(0), {})


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("reduce", [ALL_REDUCE, REDUCE_SCATTER], ids=["whole", "sharded"])
def test_means_and_their_squares(reduce, sizes):
    plan, tensors, sums = arrived(sizes, reduce)
    means, replicated_squares, shard_squares = finish_reduction(sums, plan, NUM_RANKS, reduce, DENOMINATOR)
    for name, tensor in tensors.items():
        kept = tensor if reduce is ALL_REDUCE else reduce.local_shard(tensor, NUM_RANKS, NUM_RANKS - 1)
        np.testing.assert_array_equal(means[name], kept / DENOMINATOR)
    expected = sum(np.sum(np.square(np.asarray(mean, np.float64))) for mean in means.values())
    summed, other = replicated_squares, shard_squares
    if reduce is REDUCE_SCATTER:
        summed, other = other, summed
    np.testing.assert_allclose(summed, expected, rtol=2e-5)  # float32: sqrt(65,537 terms) roundings of 6e-8
    assert other == 0


def sent(grads, plan, monkeypatch, *, joins):
    """The means over four ranks, and the shapes of what is summed, as would be asked for on GPUs or elsewhere."""
    monkeypatch.setattr(reduction, "joins_arrays", lambda: joins)

    def step(grads):
        local = jax.tree.map(lambda grad: grad[0], grads)
        return jax.tree.map(lambda mean: mean[None], jaxddp.sync_gradients(local, plan, "data"))

    by_rank = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(step, mesh=jaxddp.data_mesh(NUM_RANKS), in_specs=by_rank, out_specs=by_rank)
    program = jax.make_jaxpr(mapped)(grads).jaxpr.eqns[0].params["jaxpr"]
    psums = [equation for equation in program.eqns if equation.primitive.name.startswith("psum")]
    return jax.jit(mapped)(grads), [atom.aval.shape for equation in psums for atom in equation.invars]


def test_large_tensors_are_sent_as_they_are_and_small_ones_packed_where_arrays_are_joined(monkeypatch):
    monkeypatch.setattr(buffers, "LARGE_BYTES", 48)
    shapes = {"a": (3, 4), "b": (2,), "c": (5, 5), "d": (3,), "e": (13,)}
    plan = plan_buckets([TensorSpec(name, shape, "float32") for name, shape in shapes.items()], [170 / 2**20])
    assert [len(bucket.tensors) for bucket in plan.buckets] == [4, 1]
    values = np.random.default_rng(0)
    grads = {name: values.integers(-9, 9, (NUM_RANKS, *shape)).astype("f") for name, shape in shapes.items()}
    packed, operands_packed = sent(grads, plan, monkeypatch, joins=False)
    joined, operands = sent(grads, plan, monkeypatch, joins=True)
    assert operands_packed == [(42,), (13,)]
    assert operands == [(3, 4), (5, 5), (5,), (13,)]
    for name, grad in grads.items():
        expected = np.broadcast_to(grad.mean(axis=0), grad.shape)  # exact: sums of integers, over a power of two
        np.testing.assert_array_equal(joined[name], expected)
        np.testing.assert_array_equal(packed[name], expected)


def test_more_tensors_than_xla_joins_are_packed(monkeypatch):
    monkeypatch.setattr(buffers, "LARGE_BYTES", 4)
    monkeypatch.setattr(reduction, "MAX_JOINED", 3)
    grads = {name: np.ones((NUM_RANKS, 2), "f") for name in "abcd"}
    plan = plan_buckets([TensorSpec(name, (2,), "float32") for name in grads], [24 / 2**20])
    _, operands = sent(grads, plan, monkeypatch, joins=True)
    assert operands == [(2,)] * 4
    _, operands = sent(
        grads, plan_buckets(plan.buckets[0].tensors + plan.buckets[1].tensors, None), monkeypatch, joins=True
    )
    assert operands == [(8,)]


@pytest.mark.parametrize("max_in_flight", [None, 1])
def test_a_bucket_is_sent_after_the_ones_before_it(monkeypatch, max_in_flight):
    """Each takes the token of the last, or XLA would send first what is ready first, and updates would wait."""
    monkeypatch.setattr(reduction, "joins_arrays", lambda: True)  # as on GPUs
    plan = plan_per_tensor([TensorSpec(name, (2,), "float32") for name in "abc"])

    def start(grads):
        reduction_, _ = start_reduction(grads, plan, "data", ALL_REDUCE, none, max_in_flight=max_in_flight)
        return reduction_.totals, reduction_.order_token

    by_rank, everywhere = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    mapped = jax.shard_map(start, mesh=jaxddp.data_mesh(2), in_specs=by_rank, out_specs=everywhere, check_vma=False)
    equations = jax.make_jaxpr(mapped)({name: jnp.ones(4) for name in "abc"}).jaxpr.eqns[0].params["jaxpr"].eqns
    barriers = [each for each in equations if each.primitive.name == "optimization_barrier"]
    tokens = [each for each in barriers if each.outvars[-1].aval.dtype == jnp.int32]
    assert len(tokens) == 3
    for earlier, later in itertools.pairwise(tokens):
        assert later.invars[-1] is earlier.outvars[-1]
    totals, token = mapped({name: jnp.arange(4.0) for name in "abc"})
    assert token == 0
    for total in totals:
        np.testing.assert_array_equal(np.ravel(total), [2, 4])


def test_squares_of_what_was_joined():
    specs = [TensorSpec("large", (512, 600), "float32"), TensorSpec("small", (7,), "float32")]
    tensors = {spec.name: jnp.full(spec.shape, DENOMINATOR) for spec in specs}
    plan = plan_buckets(specs, None)
    sums = Reduction((buffers.pack_small(plan.buckets[0], tensors),), {}, jnp.int32(0), {})
    means = finish_reduction(sums, plan, NUM_RANKS, ALL_REDUCE, DENOMINATOR)
    assert {name: mean.shape for name, mean in means.grads.items()} == {"large": (512, 600), "small": (7,)}
    assert means.replicated_squares == 512 * 600 + 7


@pytest.mark.parametrize(
    ("sizes", "reduce", "num_sums"),
    [
        ("one", ALL_REDUCE, 1),
        ("two small", ALL_REDUCE, 2),
        ("many small", ALL_REDUCE, 2),
        ("many at the limit", ALL_REDUCE, 2),
        ("many large", ALL_REDUCE, 4),
        ("many large", REDUCE_SCATTER, 2),  # a rank keeps a quarter of each
    ],
)
def test_small_tensors_share_a_sum(sizes, reduce, num_sums):
    # XLA's multi-output fusion, the longest pass of compiling 10,000 tensors, walks the whole program for each sum.
    plan, _, sums = arrived(SIZES[sizes], reduce)
    program = jax.make_jaxpr(lambda sums: finish_reduction(sums, plan, NUM_RANKS, reduce, DENOMINATOR))(sums)
    assert str(program).count("reduce_sum[") == num_sums
