"""Buckets are summed in order, divided, taken apart and squared; on GPUs large tensors are sent as they are."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxddp
from jaxddp import ddp
from jaxddp.communication import reduction
from jaxddp.communication.buckets import TensorSpec, plan_buckets, plan_per_tensor
from jaxddp.communication.reduction import Wire, divide, reduce_buckets
from jaxddp.communication.sharding import cut, pack_rows, unpack_row

pytestmark = pytest.mark.smoke

NUM_RANKS, DIVISOR = 4, 8.0
SHAPES = {"a": (3, 4), "b": (2,), "c": (5, 5), "d": (3,), "e": (13,)}
SPECS = [TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]


def unsent(name, grad):
    return grad


@pytest.mark.parametrize("wire", ["packed", "as they are", "rows"])
def test_means_and_their_squares(monkeypatch, wire):
    monkeypatch.setattr(reduction, "LARGE_BYTES", 48)
    cuts = {name: cut(shape, NUM_RANKS) for name, shape in SHAPES.items()}

    def of(bucket):
        return {tensor.name: cuts[tensor.name] for tensor in bucket.tensors}

    last = NUM_RANKS - 1  # whose part is the one that is padded
    wires = {
        "packed": Wire(reduction.pack, lambda buffer, key: buffer, reduction.unpack, unsent),
        "as they are": Wire(reduction.pack_small, lambda buffer, key: buffer, reduction.unpack, unsent),
        "rows": Wire(
            lambda bucket, grads: pack_rows(grads, of(bucket)),
            lambda rows, key: rows[last],
            lambda bucket, row: unpack_row(row, of(bucket)),
            unsent,
        ),
    }
    rng = np.random.default_rng(0)
    grads = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
    kept = {name: cuts[name].local_shard(grad, last) if wire == "rows" else grad for name, grad in grads.items()}
    plan = plan_buckets(SPECS, [170 / 2**20])
    means = jax.jit(lambda grads: reduce_buckets(plan, wires[wire], grads, DIVISOR))(grads)
    for name, grad in kept.items():
        np.testing.assert_array_equal(means.grads[name], grad / DIVISOR)
    expected = sum(np.sum(np.square(np.asarray(mean, np.float64))) for mean in means.grads.values())
    np.testing.assert_allclose(means.squares, expected, rtol=1e-5)  # float32: 55 terms, each rounded to 6e-8


def sent(grads, plan, monkeypatch, *, joins):
    """The means over four ranks, and the shapes of what is summed, as would be asked for on GPUs or elsewhere."""
    for module in (reduction, ddp):
        monkeypatch.setattr(module, "joins_arrays", lambda: joins)

    def step(grads):
        local = jax.tree.map(lambda grad: grad[0], grads)
        return jax.tree.map(lambda mean: mean[None], jaxddp.sync_gradients(local, plan, "data"))

    mapped = jax.shard_map(step, mesh=jaxddp.data_mesh(NUM_RANKS), in_specs=P("data"), out_specs=P("data"))
    program = jax.make_jaxpr(mapped)(grads).jaxpr.eqns[0].params["jaxpr"]
    psums = [equation for equation in program.eqns if equation.primitive.name.startswith("psum")]
    return jax.jit(mapped)(grads), [atom.aval.shape for equation in psums for atom in equation.invars]


def test_large_tensors_are_sent_as_they_are_and_small_ones_packed_where_arrays_are_joined(monkeypatch):
    monkeypatch.setattr(reduction, "LARGE_BYTES", 48)
    plan = plan_buckets(SPECS, [170 / 2**20])
    assert [len(bucket.tensors) for bucket in plan.buckets] == [4, 1]
    values = np.random.default_rng(0)
    grads = {name: values.integers(-9, 9, (NUM_RANKS, *shape)).astype("f") for name, shape in SHAPES.items()}
    packed, operands_packed = sent(grads, plan, monkeypatch, joins=False)
    joined, operands = sent(grads, plan, monkeypatch, joins=True)
    assert operands_packed == [(42,), (13,)]
    assert operands == [(3, 4), (5, 5), (5,), (13,)]
    for name, grad in grads.items():
        expected = np.broadcast_to(grad.mean(axis=0), grad.shape)  # exact: sums of integers, over a power of two
        np.testing.assert_array_equal(joined[name], expected)
        np.testing.assert_array_equal(packed[name], expected)


def test_more_tensors_than_xla_joins_are_packed(monkeypatch):
    monkeypatch.setattr(reduction, "LARGE_BYTES", 4)
    monkeypatch.setattr(reduction, "MAX_JOINED", 3)
    grads = {name: np.ones((NUM_RANKS, 2), "f") for name in "abcd"}
    specs = [TensorSpec(name, (2,), "float32") for name in grads]
    for cap, expected in ((24 / 2**20, [(2,)] * 4), (None, [(8,)])):  # three and one tensor in a bucket, or all four
        assert sent(grads, plan_buckets(specs, cap), monkeypatch, joins=True)[1] == expected


@pytest.mark.parametrize("number", [None, 1])
def test_a_bucket_is_sent_after_the_ones_before_it(monkeypatch, number):
    """Each takes the token of the last, or GPUs would send first what is ready first, and updates would wait."""
    monkeypatch.setattr(reduction, "joins_arrays", lambda: True)
    plan = plan_per_tensor([TensorSpec(name, (2,), "float32") for name in "abc"])
    wire = Wire(reduction.pack, lambda buffer, key: jax.lax.psum(buffer, "data"), reduction.unpack, unsent)

    def reduce(grads):
        return reduce_buckets(plan, wire, grads, 2, number).grads

    mapped = jax.shard_map(reduce, mesh=jaxddp.data_mesh(2), in_specs=P("data"), out_specs=P(), check_vma=False)
    equations = jax.make_jaxpr(mapped)({name: jnp.ones(4) for name in "abc"}).jaxpr.eqns[0].params["jaxpr"].eqns
    barriers = [each for each in equations if each.primitive.name == "optimization_barrier"]
    tokens = [each for each in barriers if each.outvars[-1].aval.dtype == jnp.int32]
    assert len(tokens) == 3
    for earlier, later in itertools.pairwise(tokens):
        assert later.invars[-1] is earlier.outvars[-1]
    for mean in jax.jit(mapped)({name: jnp.arange(4.0) for name in "abc"}).values():
        np.testing.assert_array_equal(mean, [1, 2])


def test_16_bit_sums_are_divided_by_the_number_itself():
    assert divide(jnp.asarray(512, jnp.bfloat16), 514) == jnp.bfloat16(512 / 514) != 1  # as by 512, its nearest
