"""Integer-valued data make every sum exact, so all comparisons here are bitwise."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxddp.communication.collectives import all_gather, all_reduce, broadcast, reduce, reduce_scatter, send_recv
from jaxddp.communication.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from jaxddp.comparison_test import refusal
from jaxddp.mesh import data_mesh

CASES = [(3, "float64"), (3, "bfloat16"), (3, "int32"), *((num_ranks, "float32") for num_ranks in (1, 2, 3, 8))]


def integer_valued(num_ranks, *shape, dtype="float32"):
    """One array per rank, [num_ranks, *shape]; small integers, so that even bfloat16 sums are exact."""
    values = jnp.asarray(np.random.default_rng(num_ranks).integers(-8, 9, (num_ranks, *shape)), dtype)
    return jnp.round(values / 3 * 2**47) if dtype == "float64" else values  # exact in float64, not in float32


def total_of(per_rank):
    return per_rank.astype("float64").sum(axis=0).astype(per_rank.dtype)


def on_ranks(fn, per_rank, how="vma"):
    """Runs ``fn(x, axis)`` on every rank; the ranks' results, stacked."""

    def of_rank(x):
        return jax.tree.map(lambda found: found[None], fn(x[0], "data"))

    if how == "pmap":
        return jax.pmap(lambda x: fn(x, "data"), axis_name="data")(per_rank)
    options = {"mesh": data_mesh(len(per_rank)), "in_specs": P("data"), "out_specs": P("data")}
    return jax.jit(jax.shard_map(of_rank, check_vma=how == "vma", **options))(per_rank)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert np.array_equal(np.asarray(actual), np.asarray(expected))


@pytest.mark.sample
@pytest.mark.parametrize("how", ["vma", "no_vma", "pmap"])
@pytest.mark.parametrize(("num_ranks", "dtype"), CASES)
def test_every_primitive_gives_the_ranks_what_its_equation_says(x64, num_ranks, dtype, how):
    x, root = integer_valued(num_ranks, 2 * num_ranks, 3, dtype=dtype), num_ranks - 1
    total, off_root = total_of(x), jnp.arange(num_ranks)[:, None, None] != root
    primitives, expected = zip(
        (all_reduce, jnp.stack([total] * num_ranks)),
        (reduce_scatter, total.reshape(num_ranks, 2, 3)),
        (all_gather, jnp.stack([x.reshape(-1, 3)] * num_ranks)),
        (partial(broadcast, root=root), jnp.stack([x[root]] * num_ranks)),
        (broadcast, jnp.stack([x[0]] * num_ranks)),  # by default the root is rank 0
        (partial(reduce, root=root), jnp.where(off_root, 0, total)),
        (reduce, jnp.zeros_like(x).at[0].set(total)),
        # Rank 0 sends to the last rank alone: the others, itself included unless it is the last, receive nothing.
        (partial(send_recv, pairs=[(0, root)]), jnp.where(off_root, 0, x[0])),
        (partial(send_recv, pairs=[(root, root)]), jnp.where(off_root, 0, x)),  # a rank may send to itself
        strict=True,
    )
    found = on_ranks(lambda x, axis: [primitive(x, axis) for primitive in primitives], x, how)
    for actual, values in zip(found, expected, strict=True):
        assert_same(actual, values.astype(x.dtype))


def test_broadcast_ignores_what_the_other_ranks_hold():
    x = jnp.array([[jnp.nan], [2.0], [jnp.inf]])
    assert_same(on_ranks(lambda x, axis: broadcast(x, axis, root=1), x), jnp.full((3, 1), 2.0))
    flags = jnp.array([[True], [False], [True]])
    assert_same(on_ranks(lambda x, axis: broadcast(x, axis, root=1), flags), jnp.zeros((3, 1), bool))


@pytest.mark.sample
@pytest.mark.parametrize("how", ["vma", "no_vma", "pmap"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0)])
def test_empty_arrays_come_back_empty(shape, how):
    x = jnp.zeros((4, *shape))
    assert on_ranks(reduce_scatter, x, how).shape == (4, shape[0] // 4, *shape[1:])
    assert on_ranks(all_gather, x, how).shape == (4, shape[0] * 4, *shape[1:])
    for keeps in (all_reduce, broadcast, reduce, lambda x, axis: send_recv(x, axis, [(0, 1)])):
        assert on_ranks(keeps, x, how).shape == (4, *shape)


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_input_is_every_ranks_own(check_vma):
    def all_of_them(x):
        library = all_reduce(x, "data"), reduce_scatter(x, "data"), all_gather(x, "data"), broadcast(x, "data")
        return *library, ring_reduce_scatter(x, "data"), ring_all_gather(x, "data"), ring_all_reduce(x, "data")

    x = jnp.arange(4.0)
    # The first and the fourth are known to be replicated, so P() must be accepted under check_vma.
    specs = {"in_specs": P(), "out_specs": (P(), P("data"), P("data"), P(), *[P("data")] * 3)}
    run = jax.shard_map(all_of_them, mesh=data_mesh(4), check_vma=check_vma, **specs)
    summed, gathered = 4 * x, jnp.tile(x, 16)
    expected = summed, summed, gathered, x, summed, gathered, jnp.tile(summed, 4)
    for found, right in zip(jax.jit(run)(x), expected, strict=True):
        assert_same(found, right)


def test_each_primitive_is_one_collective():
    for fn, opcode in (
        (all_reduce, "all-reduce"),
        (reduce_scatter, "reduce-scatter"),
        (all_gather, "all-gather"),
        (broadcast, "all-reduce"),
        (reduce, "all-reduce"),
        (partial(send_recv, pairs=[(0, 1), (1, 0)]), "collective-permute"),
    ):
        mapped = partial(jax.shard_map, mesh=data_mesh(4), in_specs=P("data"), out_specs=P("data"))
        program = jax.jit(mapped(partial(fn, axis="data"))).lower(jnp.zeros((64, 2))).compile().as_text()
        found = re.findall(r" (all-reduce|reduce-scatter|all-gather|collective-permute|all-to-all)\(", program)
        assert found == [opcode]


def test_errors_name_the_value_and_the_rule():
    x = jnp.zeros((4, 10))
    for cuts in (reduce_scatter, ring_reduce_scatter):
        assert "dimension 0 (=10) must be divisible by num_ranks (=4)" in refusal(on_ranks, cuts, x)
    for needs_dimension_0 in (reduce_scatter, all_gather, ring_reduce_scatter, ring_all_gather):
        assert "shape (=()) must have a dimension 0" in refusal(on_ranks, needs_dimension_0, x[:, 0])
    for rooted in (broadcast, reduce):
        for root in (4, -1, 1.5):
            found = refusal(on_ranks, lambda x, axis, fn=rooted, root=root: fn(x, axis, root), x)
            assert f"root (={root}) must be at least 0 and below num_ranks (=4), an integer" in found
    for pairs, rule in (
        ([(0, 4)], "must name ranks from 0 to below num_ranks (=4)"),
        ([(0, 0.5)], "must name ranks from 0 to below num_ranks (=4)"),
        ([(-1, 0)], "must name ranks from 0 to below num_ranks (=4)"),
        ([(0, 1), (0, 2)], "must send at most once from each rank, and to each"),
        (iter([(0, 1)]), "must be a sequence of pairs, (from rank, to rank)"),
        ([(0, 1), (2, 1)], "must send at most once from each rank, and to each"),
    ):
        found = refusal(on_ranks, lambda x, axis, pairs=pairs: send_recv(x, axis, pairs), x)
        assert rule in found
