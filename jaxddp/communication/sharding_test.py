"""Cutting and joining give every element back, whatever the shape and the number of ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxddp
from jaxddp.communication.buckets import Bucket, TensorSpec, bucket_width, chunk_elements
from jaxddp.communication.sharding import Cut, pack_chunks, pack_local_shards, split_chunks, unpack_chunks

SHAPES = [(), (1,), (3,), (7, 5), (4, 3, 2), (0,), (3, 0), (8, 8)]


def filled(shape):
    return jnp.arange(1, 1 + int(np.prod(shape)), dtype=jnp.float32).reshape(shape)


@pytest.mark.sample
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("shape", "by_row"),
    [(shape, by_row) for shape in SHAPES for by_row in ((False, True) if len(shape) > 1 else (False,))],
    ids=str,
)
def test_a_cut_tensor_comes_back_and_ranks_hold_equal_parts(shape, by_row, num_ranks):
    tensor, cut = filled(shape), Cut(shape, num_ranks, by_row)
    chunks = cut.to_chunks(tensor)
    assert chunks.shape == (num_ranks, int(np.prod(cut.shard_shape)))
    assert len(cut.shard_shape) == max(len(shape), 1)  # masks by ndim mean the same
    np.testing.assert_array_equal(cut.from_chunks(chunks), tensor)
    # Padding is zeros: all else would move what optimizers sum up.
    assert float(chunks.sum()) == float(tensor.sum())
    for rank in range(num_ranks):
        np.testing.assert_array_equal(cut.local_shard(tensor, rank).reshape(-1), chunks[rank])
    for array in (tensor, np.asarray(tensor)):
        joined = cut.to_global(array)
        assert joined.shape == cut.global_shape
        assert isinstance(joined, np.ndarray) == isinstance(array, np.ndarray)  # the host's stay on the host
        np.testing.assert_array_equal(cut.from_global(joined), tensor)


@pytest.mark.parametrize("by_row", [False, True])
def test_what_lies_on_a_rank_is_that_ranks_shard(by_row):
    mesh, cut, tensor = jaxddp.data_mesh(4), Cut((6, 5), 4, by_row), filled((6, 5))
    placed = jax.device_put(cut.to_global(tensor), NamedSharding(mesh, cut.spec("data")))
    for rank, shard in enumerate(placed.addressable_shards):
        np.testing.assert_array_equal(shard.data, cut.local_shard(tensor, rank))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_row_r_of_a_bucket_is_what_rank_r_owns(num_ranks):
    bucket = Bucket(tuple(TensorSpec(str(shape), shape, "float32") for shape in [(7, 5), (3,), (), (4, 3, 2)]))
    tensors = {tensor.name: filled(tensor.shape) for tensor in bucket.tensors}
    buffer = pack_chunks(bucket, tensors, num_ranks)
    assert buffer.shape == (num_ranks, bucket_width(bucket, num_ranks))
    for name, tensor in unpack_chunks(bucket, buffer).items():
        np.testing.assert_array_equal(tensor, tensors[name])
    for rank in range(num_ranks):
        own = split_chunks(bucket, buffer[rank], num_ranks)
        for name, chunk in own.items():
            np.testing.assert_array_equal(
                chunk, Cut(tensors[name].shape, num_ranks).local_shard(tensors[name], rank).reshape(-1)
            )
        np.testing.assert_array_equal(pack_local_shards(bucket, own), buffer[rank])


def test_chunks_cover_a_tensor_with_less_padding_than_ranks():
    for num_elements in range(50):
        for num_ranks in range(1, 12):
            padding = num_ranks * chunk_elements(num_elements, num_ranks) - num_elements
            assert 0 <= padding < num_ranks
