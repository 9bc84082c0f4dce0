"""The shard layout: chunks of any tensor on any number of ranks, single and in buckets."""

import math

import pytest
import torch

from jaxddp.communication.buckets import Bucket, TensorSpec, bucket_width, chunk_elements, plan_buckets
from torchref.communication.sharding import local_shard, pack_chunks, pack_local_shards, split_chunks, unpack_chunks

SHAPES = {"matrix": (5, 7), "even": (6, 4), "small": (2,), "scalar": (), "empty": (0, 3)}
ranks = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])


def tensors(dtype=torch.float64):
    """Integers from 1 on: padding is 0 and nothing else is."""
    counts = torch.arange(1, 1 + sum(math.prod(shape) for shape in SHAPES.values())).to(dtype)
    parts = counts.split([math.prod(shape) for shape in SHAPES.values()])
    return {name: part.clone().view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def bucket(*names):
    return Bucket(tuple(TensorSpec(name, SHAPES[name], "float64") for name in names or SHAPES))


@ranks
def test_joined_shards_are_the_tensor_and_zeros(num_ranks):
    for name, tensor in tensors().items():
        joined = torch.cat([local_shard(tensor, num_ranks, rank) for rank in range(num_ranks)])
        assert len(joined) == num_ranks * chunk_elements(tensor.numel(), num_ranks), name
        assert torch.equal(joined[: tensor.numel()], tensor.flatten())
        assert not joined[tensor.numel() :].any()
        assert len(joined) - tensor.numel() < num_ranks


@ranks
@pytest.mark.parametrize("names", [(), ("even",), ("matrix",), ("small",), ("scalar",), ("empty",)])
def test_row_r_of_a_buffer_holds_the_shards_of_rank_r(num_ranks, names):
    one = bucket(*names)
    buffer = pack_chunks(one, tensors(), num_ranks)
    assert buffer.shape == (num_ranks, bucket_width(one, num_ranks))
    for rank in range(num_ranks):
        chunks = {tensor.name: local_shard(tensors()[tensor.name], num_ranks, rank) for tensor in one.tensors}
        assert torch.equal(buffer[rank], pack_local_shards(one, chunks))
        found = split_chunks(one, buffer[rank], num_ranks)
        assert list(found) == list(chunks)
        assert all(torch.equal(found[name], chunk) for name, chunk in chunks.items())


@ranks
@pytest.mark.parametrize("names", [(), ("even",), ("matrix",), ("small",), ("scalar",), ("empty",)])
def test_unpacking_undoes_packing(num_ranks, names):
    one, expected = bucket(*names), tensors()
    buffer = pack_chunks(one, expected, num_ranks)
    written = {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}
    assert unpack_chunks(one, buffer, out=written).keys() == {tensor.name for tensor in one.tensors}
    for tensor in one.tensors:
        assert torch.equal(unpack_chunks(one, buffer)[tensor.name], expected[tensor.name])
        assert torch.equal(written[tensor.name], expected[tensor.name])


@ranks
def test_a_given_buffer_of_any_dtype_is_filled_with_padding(num_ranks):
    out = torch.full((num_ranks, bucket_width(bucket(), num_ranks)), math.nan, dtype=torch.bfloat16)
    assert pack_chunks(bucket(), tensors(), num_ranks, out=out) is out
    assert torch.equal(out.double(), pack_chunks(bucket(), tensors(), num_ranks))  # integers below 256 are exact


def test_tensors_of_any_memory_format():
    for shape in ((2, 3, 4, 4), (2, 3, 5, 5)):
        plain = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
        strided = plain.to(memory_format=torch.channels_last)
        one = Bucket((TensorSpec("x", shape, "float64"), TensorSpec("y", (3,), "float64")))
        given = {"x": strided, "y": torch.ones(3, dtype=torch.float64)}
        buffer = pack_chunks(one, given, 4)
        assert torch.equal(buffer, pack_chunks(one, given | {"x": plain}, 4))
        target = torch.zeros_like(strided)
        unpack_chunks(one, buffer, out={"x": target, "y": torch.zeros(3, dtype=torch.float64)})
        assert torch.equal(target, plain)
        assert not target.is_contiguous()


def test_views_instead_of_copies_where_possible():
    even = tensors()["even"]
    assert local_shard(even, 4, 2).data_ptr() == even.view(-1)[12:].data_ptr()
    assert pack_chunks(bucket("even"), {"even": even}, 4).data_ptr() == even.data_ptr()
    buffer = pack_chunks(bucket("matrix"), tensors(), 4)
    assert unpack_chunks(bucket("matrix"), buffer)["matrix"].data_ptr() == buffer.data_ptr()


def test_padding_is_less_than_one_element_a_rank_and_tensor():
    plan = plan_buckets([TensorSpec(name, shape, "float64") for name, shape in SHAPES.items()], None)
    assert "empty" not in plan.names
    (one,) = plan.buckets
    for num_ranks in (1, 2, 3, 8):
        padding = num_ranks * bucket_width(one, num_ranks) - one.num_elements
        assert 0 <= padding <= (num_ranks - 1) * len(one.tensors)
