"""Twin of jaxddp's properties_test.py: what is packed or cut comes back, whatever the tensors, caps and ranks."""

import pytest
import torch
from hypothesis import given, strategies as st

from jaxddp.communication.buckets import bucket_width, plan_buckets
from jaxddp.communication.properties_test import CAPS, DTYPES, FIXED, NUM_RANKS, RULES, tensors_of
from torchref.communication import reduction, sharding


def values_of(tensors):
    return {
        tensor.name: (torch.arange(tensor.num_elements) % 7 + index % 5)
        .reshape(tensor.shape)
        .to(getattr(torch, tensor.dtype))
        for index, tensor in enumerate(tensors)
    }


def assert_same(found, values):
    expected = {name: tensor for name, tensor in values.items() if tensor.numel()}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])


def transposed(values, are_transposed):
    return {
        name: tensor.transpose(0, -1).contiguous().transpose(0, -1) if is_transposed and tensor.dim() > 1 else tensor
        for (name, tensor), is_transposed in zip(values.items(), are_transposed, strict=False)
    }


@FIXED
@given(tensors_of(), CAPS, RULES, st.lists(st.booleans(), min_size=12, max_size=12))
def test_packed_tensors_come_back(tensors, bucket_mb, rule, are_transposed):
    values, found = transposed(values_of(tensors), are_transposed), {}
    for bucket in plan_buckets(tensors, bucket_mb, rule=rule).buckets:
        packed = reduction.pack(bucket, values)
        assert packed.numel() == bucket.num_elements
        found |= reduction.unpack(bucket, packed)
    assert_same(found, values)


@FIXED
@given(tensors_of(), CAPS, NUM_RANKS, st.lists(st.booleans(), min_size=12, max_size=12))
def test_scattered_and_gathered_tensors_come_back(tensors, bucket_mb, num_ranks, are_transposed):
    values, found = transposed(values_of(tensors), are_transposed), {}
    cuts = {name: sharding.Cut(tuple(tensor.shape), num_ranks) for name, tensor in values.items()}
    for bucket in plan_buckets(tensors, bucket_mb).buckets:
        rows = sharding.pack_rows(bucket, values, cuts)
        assert tuple(rows.shape) == (num_ranks, bucket_width(bucket, num_ranks))
        for rank, row in enumerate(rows):
            for name, shard in sharding.unpack_row(bucket, row, cuts).items():
                assert torch.equal(shard, cuts[name].local_shard(values[name], rank))
        of_ranks = [sharding.unpack_row(bucket, row, cuts) for row in rows]  # as ranks hold them
        gathered = torch.stack([sharding.pack_row(bucket, shards) for shards in of_ranks])
        found |= sharding.unpack_rows(bucket, gathered, cuts)
    assert_same(found, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_of_dtypes_are_torchs(dtype):
    spec = reduction.tensor_spec("t", torch.zeros(3, dtype=getattr(torch, dtype)))
    assert (spec.dtype, spec.num_bytes) == (dtype, 3 * getattr(torch, dtype).itemsize)


def test_shards_have_the_number_of_dimensions_of_the_tensor_and_are_views_where_possible():
    shapes = ((5, 7), (6, 4), (2,), (), (0, 3))
    assert [sharding.Cut(shape, 4).shard_shape for shape in shapes] == [(1, 9), (1, 6), (1,), (1,), (1, 0)]
    even = torch.arange(1.0, 25).view(6, 4)
    assert sharding.Cut(even.shape, 3).local_shard(even, 2).data_ptr() == even[4:].data_ptr()
    assert sharding.Cut(even.shape, 5).to_rows(even).tolist()[4] == [21.0, 22.0, 23.0, 24.0, 0.0]
