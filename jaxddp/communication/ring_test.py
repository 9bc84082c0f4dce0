"""Integer-valued data make every sum exact, so what the ring gives is compared bit for bit."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxddp.communication.collectives_test import CASES, assert_same, integer_valued, on_ranks, total_of
from jaxddp.communication.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from jaxddp.mesh import data_mesh


@pytest.mark.sample
@pytest.mark.parametrize("how", ["vma", "no_vma", "pmap"])
@pytest.mark.parametrize(("num_ranks", "dtype"), CASES)
def test_the_ring_gives_sums_and_gathers_as_xlas_collectives_do(x64, num_ranks, dtype, how):
    def ring(x, axis):  # the last of a length that is no multiple of the ranks
        return ring_reduce_scatter(x, axis), ring_all_gather(x, axis), ring_all_reduce(x[:, 1:], axis)

    x = integer_valued(num_ranks, 3 * num_ranks, 2, dtype=dtype)
    scattered, gathered, reduced = on_ranks(ring, x, how)
    assert_same(scattered, total_of(x).reshape(num_ranks, 3, 2))
    assert_same(gathered, jnp.stack([x.reshape(-1, 2)] * num_ranks))
    assert_same(reduced, jnp.stack([total_of(x)[:, 1:]] * num_ranks))


@pytest.mark.sample
@pytest.mark.parametrize("num_ranks", [3, 8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (0, 5), (2, 3, 5)])
def test_all_reduce_of_any_shape(shape, num_ranks):
    x = integer_valued(num_ranks, *shape)
    assert_same(on_ranks(ring_all_reduce, x), jnp.stack([x.sum(axis=0)] * num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_compiled_programs_hold_the_planned_sends_and_nothing_else(num_ranks):
    for fn, length, num_sends in (
        (ring_reduce_scatter, 5 * num_ranks, num_ranks - 1),
        (ring_all_gather, 5, num_ranks - 1),
        (ring_all_reduce, 5 * num_ranks, 2 * (num_ranks - 1)),
    ):
        options = {"mesh": data_mesh(num_ranks), "in_specs": P("data"), "out_specs": P("data")}
        mapped = jax.shard_map(lambda x, fn=fn: fn(x[0], "data")[None], **options)
        program = jax.jit(mapped).lower(jnp.zeros((num_ranks, length))).compile().as_text()
        sends = re.findall(r"= (\w+\[\d+\])\S* collective-permute\(", program)
        assert sends == ["f32[5]"] * num_sends  # a chunk each, never the whole array
        assert not re.search(r" (all-reduce|all-gather|reduce-scatter|all-to-all)\(", program)
