"""The shard layout; properties_test.py holds that what is cut or packed comes back."""

import torch

from torchref.communication.sharding import Cut


def test_shards_have_the_number_of_dimensions_of_the_tensor_and_are_views_where_possible():
    shapes = ((5, 7), (6, 4), (2,), (), (0, 3))
    assert [Cut(shape, 4).shard_shape for shape in shapes] == [(1, 9), (1, 6), (1,), (1,), (1, 0)]
    even = torch.arange(1.0, 25).view(6, 4)
    assert Cut(even.shape, 3).local_shard(even, 2).data_ptr() == even[4:].data_ptr()
    assert Cut(even.shape, 5).to_rows(even).tolist()[4] == [21.0, 22.0, 23.0, 24.0, 0.0]
