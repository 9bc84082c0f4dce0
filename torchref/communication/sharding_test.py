"""The shard layout: shards of any tensor on any number of ranks, single and in buckets."""

import math

import pytest
import torch

from torchref.communication.sharding import cut

SHAPES = {"matrix": (5, 7), "even": (6, 4), "second": (5, 12), "small": (2,), "scalar": (), "empty": (0, 3)}
ranks = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])


def tensors():
    """Integers from 1 on: padding is 0 and nothing else is."""
    counts = torch.arange(1.0, 1 + sum(math.prod(shape) for shape in SHAPES.values()))
    parts = counts.split([math.prod(shape) for shape in SHAPES.values()])
    return {name: part.clone().view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def test_a_tensor_is_cut_along_the_first_dimension_that_divides():
    found = [cut(shape, 4) for shape in SHAPES.values()]
    assert [one.dim for one in found] == [None, 1, 1, None, None, None]
    assert [one.shard_shape for one in found] == [(1, 9), (6, 1), (5, 3), (1,), (1,), (1, 0)]


@ranks
def test_shards_have_the_number_of_dimensions_of_the_tensor(num_ranks):
    for name, tensor in tensors().items():
        one = cut(tensor.shape, num_ranks)
        for rank, row in enumerate(one.to_rows(tensor)):
            shard = one.local_shard(tensor, rank)
            assert shard.dim() == max(tensor.dim(), 1), name
            assert shard.is_contiguous() and torch.equal(shard.reshape(-1), row)
            if one.dim is not None:
                assert torch.equal(shard, tensor.chunk(num_ranks, one.dim)[rank])


def test_views_instead_of_copies_where_possible():
    even = tensors()["even"]
    assert cut(even.shape, 3).local_shard(even, 2).data_ptr() == even[4:].data_ptr()
    assert cut(even.shape, 3).to_rows(even).data_ptr() == even.data_ptr()
