"""Integer-valued data make every sum exact, so the ring is compared with XLA's own collectives bit for bit."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxddp.communication.collectives import all_gather, all_reduce, reduce_scatter
from jaxddp.communication.collectives_test import DTYPES, assert_same, integer_valued, on_ranks
from jaxddp.communication.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from jaxddp.mesh import data_mesh


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ring_equals_xlas_collectives_for_any_number_of_ranks(num_ranks):
    x = integer_valued(num_ranks, 3 * num_ranks, 2)
    assert_same(on_ranks(ring_reduce_scatter, x), on_ranks(reduce_scatter, x))
    assert_same(on_ranks(ring_all_gather, x), on_ranks(all_gather, x))
    assert_same(on_ranks(ring_all_reduce, x), on_ranks(all_reduce, x))


@pytest.mark.sample
@pytest.mark.parametrize("num_ranks", [3, 8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (0, 5), (2, 3, 5)])
def test_all_reduce_of_any_shape(shape, num_ranks):
    x = integer_valued(num_ranks, *shape)
    assert_same(on_ranks(ring_all_reduce, x), jnp.stack([x.sum(axis=0)] * num_ranks))


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["vma", "no_vma", "pmap"])
def test_dtypes_and_ways_to_map(x64, how, dtype):
    x = integer_valued(4, 8, dtype=dtype)
    if dtype == "float64":
        x = jnp.round(x / 3 * 2**50)  # exact in float64, not in float32
    assert_same(on_ranks(ring_reduce_scatter, x, how), on_ranks(reduce_scatter, x, how))
    assert_same(on_ranks(ring_all_gather, x, how), on_ranks(all_gather, x, how))
    assert_same(on_ranks(ring_all_reduce, x[:, :7], how), on_ranks(all_reduce, x[:, :7], how))


def compiled_text(fn, num_ranks, length):
    mapped = jax.shard_map(
        lambda x: fn(x[0], "data")[None], mesh=data_mesh(num_ranks), in_specs=P("data"), out_specs=P("data")
    )
    return jax.jit(mapped).lower(jnp.zeros((num_ranks, length))).compile().as_text()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_compiled_programs_hold_the_planned_sends_and_nothing_else(num_ranks):
    for fn, length, num_sends in (
        (ring_reduce_scatter, 5 * num_ranks, num_ranks - 1),
        (ring_all_gather, 5, num_ranks - 1),
        (ring_all_reduce, 5 * num_ranks, 2 * (num_ranks - 1)),
    ):
        program = compiled_text(fn, num_ranks, length)
        sends = re.findall(r"= (\w+\[\d+\])\S* collective-permute\(", program)
        assert sends == ["f32[5]"] * num_sends  # a chunk each, never the whole array
        assert not re.search(r" (all-reduce|all-gather|reduce-scatter|all-to-all)\(", program)
