"""Where the shards of a cut tensor lie; ``properties_test.py`` has that all shapes come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxddp
from jaxddp.communication.sharding import Cut, cut


def filled(shape):
    return jnp.arange(1, 1 + int(np.prod(shape)), dtype=jnp.float32).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((8, 4), None, (0, (2, 4))),
        ((6, 8), None, (1, (6, 2))),
        ((8, 4), (1, 0), (1, (8, 1))),
        ((8, 6), (1,), (None, (1, 12))),
        ((6, 5), None, (None, (1, 8))),  # 30 elements and 2 of padding
        ((), None, (None, (1,))),
        ((0, 3), None, (0, (0, 3))),
    ],
)
def test_a_tensor_is_cut_along_the_first_dimension_that_the_ranks_divide(shape, dims, expected):
    found = cut(shape, 4, dims)
    assert (found.dim, found.shard_shape) == expected


@pytest.mark.parametrize("which", [Cut((8, 5), 4, 0), Cut((5, 8), 4, 1), Cut((6, 5), 4, None)])
def test_what_lies_on_a_rank_is_that_ranks_shard(which):
    mesh, tensor = jaxddp.data_mesh(4), filled(which.shape)
    placed = jax.device_put(which.to_global(tensor), NamedSharding(mesh, which.spec("data")))
    for rank, shard in enumerate(placed.addressable_shards):
        np.testing.assert_array_equal(shard.data, which.local_shard(tensor, rank))
