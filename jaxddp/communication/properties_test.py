"""Any tensors, caps and numbers of ranks: plans hold every tensor once, and what is packed or cut comes back.

Ranks are the rows of an array, and most of it runs on NumPy in place of ``jax.numpy``: a new shape is a new program.
"""

import types
from contextlib import ExitStack
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

import jaxddp
from jaxddp.communication import reduction, sharding
from jaxddp.communication.buckets import MIB, TensorSpec, bucket_width, plan_buckets, plan_per_tensor
from jaxddp.layout import Leaf

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=60)
FLOATS = ("float32", "float64", "bfloat16", "float16")
DTYPES = (*FLOATS, "int8", "int32", "uint8", "bool", "complex64")
RULES = st.sampled_from(["before", "torch"])
NUM_RANKS = st.integers(1, 9)
SHAPES = st.lists(st.integers(0, 5) | st.sampled_from([7, 13]), max_size=4).map(tuple)


def tensors_of(dtypes=DTYPES, shapes=SHAPES, max_size=12):
    kinds = st.lists(st.tuples(shapes, st.sampled_from(dtypes)), max_size=max_size)
    return kinds.map(lambda found: [TensorSpec(f"t{index}", *kind) for index, kind in enumerate(found)])


BYTES = st.sampled_from([1, 4, 8, 12, 20, 40, 300, 4092, 4100]).map(lambda num_bytes: num_bytes / MIB)
CAPS = st.none() | st.just("default") | BYTES | st.lists(BYTES, min_size=1, max_size=4)


def values_of(tensors):
    found = {}
    for index, tensor in enumerate(tensors):
        found[tensor.name] = (np.arange(tensor.num_elements) % 7 + index % 5).reshape(tensor.shape)
    return {tensor.name: found[tensor.name].astype(jnp.dtype(tensor.dtype)) for tensor in tensors}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype and array.shape == expected[name].shape
        np.testing.assert_array_equal(array, expected[name])


def numpy_for(*modules):
    names = ("concatenate", "pad", "split", "where", "arange")
    numpy = types.SimpleNamespace(**{name: getattr(np, name) for name in names}, issubdtype=jnp.issubdtype)
    patches = ExitStack()
    for module in modules:
        patches.enter_context(mock.patch.object(module, "jnp", numpy))
    return patches


@settings(FIXED, max_examples=150)
@given(tensors_of(("float32", "int8"), st.sampled_from([(), (2,), (0,), (31, 33)])), CAPS, RULES)  # few: sums meet caps
def test_a_plan_holds_every_tensor_once_within_the_caps(tensors, bucket_mb, rule):
    plan = plan_buckets(tensors, bucket_mb, rule=rule)
    place = {tensor.name: index for index, tensor in enumerate(tensors)}
    assert sorted(plan.names) == sorted(tensor.name for tensor in tensors if tensor.num_elements)
    assert plan.num_bytes == sum(tensor.num_bytes for tensor in tensors)
    last = [place[bucket.tensors[-1].name] for bucket in plan.buckets]
    assert last == sorted(last)
    if bucket_mb is None or bucket_mb == "default":
        caps = [np.inf] if bucket_mb is None else [1.0, 25.0]
    else:
        caps = bucket_mb if isinstance(bucket_mb, list) else [bucket_mb]
    for dtype in {tensor.dtype for tensor in tensors}:
        of_dtype = [bucket for bucket in plan.buckets if bucket.dtype == dtype]
        names = [tensor.name for bucket in of_dtype for tensor in bucket.tensors]
        assert names == [tensor.name for tensor in tensors if tensor.dtype == dtype and tensor.num_elements]
        for number, bucket in enumerate(of_dtype):
            cap = caps[min(number, len(caps) - 1)] * MIB
            assert all(tensor.dtype == dtype for tensor in bucket.tensors)
            following = 0 if bucket is of_dtype[-1] else of_dtype[number + 1].tensors[0].num_bytes
            if rule == "before":
                assert bucket.num_bytes <= cap or len(bucket.tensors) == 1
                assert bucket.num_bytes + following > cap or bucket is of_dtype[-1]
            else:
                assert bucket.num_bytes - bucket.tensors[-1].num_bytes < cap
                assert bucket.num_bytes >= cap or bucket is of_dtype[-1]
    assert sorted(plan_per_tensor(tensors).names) == sorted(plan.names)


@FIXED
@given(tensors_of(), CAPS, RULES)
def test_packed_tensors_come_back(tensors, bucket_mb, rule):
    values, found = values_of(tensors), {}
    with numpy_for(reduction):
        for bucket in plan_buckets(tensors, bucket_mb, rule=rule).buckets:
            packed = reduction.pack(bucket, values)
            assert packed.dtype == bucket.dtype
            end_to_end = np.concatenate([values[tensor.name].ravel() for tensor in bucket.tensors])
            np.testing.assert_array_equal(np.ravel(packed), end_to_end)
            found |= reduction.unpack(bucket, packed)
    assert_same(found, {tensor.name: values[tensor.name] for tensor in tensors if tensor.num_elements})


@FIXED
@given(tensors_of(), CAPS, NUM_RANKS)
def test_scattered_and_gathered_tensors_come_back(tensors, bucket_mb, num_ranks):
    values, found = values_of(tensors), {}
    cuts = {tensor.name: sharding.cut(tensor.shape, num_ranks) for tensor in tensors}
    with numpy_for(sharding):
        for bucket in plan_buckets(tensors, bucket_mb).buckets:
            of_bucket = {tensor.name: cuts[tensor.name] for tensor in bucket.tensors}
            rows = sharding.pack_rows(values, of_bucket)
            assert rows.shape == (num_ranks, bucket_width(bucket, num_ranks)) and rows.dtype == bucket.dtype
            of_ranks = [sharding.unpack_row(row, of_bucket) for row in rows]  # as ranks hold them
            gathered = np.concatenate([sharding.pack_row(shards, of_bucket) for shards in of_ranks])
            found |= sharding.unpack_rows(gathered, of_bucket)
    assert_same(found, {tensor.name: values[tensor.name] for tensor in tensors if tensor.num_elements})


@FIXED
@given(SHAPES, st.sampled_from(DTYPES), NUM_RANKS, st.booleans())
def test_a_cut_tensor_comes_back(shape, dtype, num_ranks, is_flat):
    cut = sharding.cut(shape, num_ranks, () if is_flat else None)
    assert len(cut.shard_shape) == max(len(shape), 1)  # masks by ndim mean the same
    (tensor,) = values_of([TensorSpec("t", shape, dtype)]).values()
    with numpy_for(sharding):
        rows, leaf = cut.to_rows(tensor), Leaf(cut.shape, tensor.dtype, cut)
        laid_out = leaf.to_global(tensor)
        shards = [row.reshape(cut.shard_shape) for row in rows]
        assert_same({"rows": cut.from_rows(rows), "global": leaf.from_global(laid_out)},
                    {"rows": tensor, "global": tensor})  # fmt: skip
        assert laid_out.shape == leaf.held.shape
        np.testing.assert_array_equal(np.concatenate(shards, axis=-1 if cut.dim is None else cut.dim), laid_out)
    assert cut.dim is not None or not rows.reshape(-1)[tensor.size :].any()  # padding is zeros
    assert 0 <= num_ranks * cut.chunk - tensor.size < num_ranks
    assert cut.dim is None or num_ranks * cut.chunk == tensor.size


def test_a_tensor_is_cut_along_the_first_dimension_that_the_ranks_divide():
    for shape, dims, dim, shard_shape in (
        ((8, 4), None, 0, (2, 4)),
        ((6, 8), None, 1, (6, 2)),
        ((8, 4), (1, 0), 1, (8, 1)),
        ((8, 6), (1,), None, (1, 12)),
        ((6, 5), None, None, (1, 8)),  # 30 elements and 2 of padding
        ((), None, None, (1,)),
        ((0, 3), None, 0, (0, 3)),
    ):
        found = sharding.cut(shape, 4, dims)
        assert (found.dim, found.shard_shape) == (dim, shard_shape)


def test_what_lies_on_a_rank_is_that_ranks_shard():
    for which in (sharding.Cut((8, 5), 4, 0), sharding.Cut((5, 8), 4, 1), sharding.Cut((6, 5), 4, None)):
        tensor = np.arange(np.prod(which.shape)).reshape(which.shape)
        leaf = Leaf(which.shape, tensor.dtype, which)
        placed = jax.device_put(leaf.to_global(tensor), leaf.sharding(jaxddp.data_mesh(4), "data"))
        for rank, shard in enumerate(placed.addressable_shards):
            np.testing.assert_array_equal(shard.data, which.local_shard(tensor, rank))
