"""`plain.py` of both packages trains as one device does, and what XLA makes of its JAX version unasked."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxddp
from jaxddp import plain
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.comparison_test import mostly_full
from jaxddp.models.toy_test import ToyMLP

from . import jax_side
from .cases import Case
from .inputs import batches, largest_difference
from .torch_side import train_plain_on_rank

ATOL = 1e-12  # float64: only the order of sums differs
# Plain strategy -> its options.
STRATEGIES = {
    "naive": {},
    "flat": {},
    "overlapped": {},
    "bucketed": {"bucket_bytes": 1024},  # 3 buckets
    "zero1": {},
    "zero2": {"num_microbatches": 3},
    "zero3": {},
}


def initial_params():
    return jax_side.initial_params("toy", "float64")


def start(name, tx, num_ranks, **options):
    graph, _ = nnx.split(ToyMLP(10, 16, 5, rngs=nnx.Rngs(0)))
    model = plain.layer(lambda params, x: nnx.merge(graph, params)(x))
    loss_fn = lambda params, batch: jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2)  # noqa: E731
    return getattr(plain, name)(loss_fn, tx, initial_params(), jaxddp.data_mesh(num_ranks), **options)


NUM_STEPS = 5
QUICK = {(name, 3, "adamw") for name in STRATEGIES} | {("naive", 1, "sgd"), ("zero3", 2, "sgd")}
PRODUCT = itertools.product(STRATEGIES, (1, 2, 3), ("sgd", "adamw"))


@pytest.mark.parametrize("name, num_ranks, optimizer", mostly_full(QUICK, PRODUCT))
def test_the_plain_ones_end_where_one_device_does(name, num_ranks, optimizer, ranks):
    options = STRATEGIES[name]
    with jax.enable_x64(True):
        weights = to_numpy(initial_params())
        state, step = start(name, jax_side.OPTIMIZERS[optimizer](), num_ranks, **options)
        for batch in batches("toy", "float64")[:NUM_STEPS]:
            state, _ = step(state, batch)
        # Shards of zero3 are flat, and padded at the end.
        full = [np.ravel(leaf)[: like.size].reshape(like.shape) for leaf, like in _pairs(state[0], initial_params())]
        ours = to_numpy(jax.tree.unflatten(jax.tree.structure(initial_params()), full))
    expected = jax_side.train_on_one_device(Case("naive", optimizer, num_ranks, "toy", "float64"), NUM_STEPS)
    results = ranks.run(train_plain_on_rank, name, optimizer, weights, NUM_STEPS, options, num_ranks=num_ranks)
    assert largest_difference(expected, weights) > 1e-3  # trained at all
    for found in (ours, *(theirs for theirs, _ in results)):
        assert largest_difference(found, expected) <= ATOL
    if name == "zero3":  # between steps, no parameter of the module holds anything
        assert [held_bytes for _, held_bytes in results] == [[0] * len(weights)] * num_ranks


def _pairs(left, right):
    return zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_a_rank_keeps_its_part_of_the_state(name):
    with jax.enable_x64(True):
        params = initial_params()
        state, step = start(name, optax.adamw(1e-3), 4)
        state, _ = step(state, batches("toy", "float64")[0])
        moments = state[1][0].mu
        sharded = [moments, state[1][0].nu, *([state[0]] if name == "zero3" else [])]
        for tree in sharded:
            for leaf, like in _pairs(tree, params):
                assert [shard.data.shape for shard in leaf.addressable_shards] == [(-(-like.size // 4),)] * 4


def compiled(name, keep, **options):
    """The compiled step on 4 ranks: by default, or with the options that keep the plan."""
    with jax.enable_x64(True):
        state, step = start(name, optax.sgd(0.1), 4, **options)
        compiler_options = jaxddp.compile_options(jaxddp.make_strategy(name), "cpu") if keep else {}
        program = step.lower(state, batches("toy", "float64")[0]).compile(compiler_options=compiler_options)
        return jaxddp.read_schedule(program)


LOSS = 8
UP, NORM, DOWN = 10 * 16 * 8, 16 * 8, 16 * 5 * 8  # bytes of the toy's gradients; norm has two, scale and bias
ALL = UP + NORM + NORM + DOWN
KEPT = {
    "naive": [LOSS, UP, NORM, NORM, DOWN],
    "flat": [LOSS, ALL],
    "overlapped": [LOSS, UP, NORM, NORM, DOWN],
    "bucketed": [LOSS, UP, NORM + NORM + DOWN],
}


@pytest.mark.parametrize("name", KEPT)
def test_xla_merges_plain_all_reduces_into_one_unless_told_not_to(name):
    options = STRATEGIES[name]
    assert compiled(name, keep=False, **options).gradient_collectives() == [("all-reduce", LOSS + ALL)]
    kept = compiled(name, keep=True, **options)
    assert kept.gradient_collectives() == sorted(("all-reduce", num_bytes) for num_bytes in KEPT[name])
    # naive and flat have everything to send when the backward ends, the others only what came last.
    late = kept.overlap().bytes_started_after_backward
    assert late == (UP if name in ("overlapped", "bucketed") else ALL)


def test_xla_on_cpu_undoes_the_second_gather_of_plain_zero3_unless_told_not_to():
    def num_gathers(keep):
        return [kind for kind, _ in compiled("zero3", keep).gradient_collectives()].count("all-gather")

    # One per parameter: kept from the forward, as if nothing were checkpointed. XLA of jax 0.11 leaves both.
    assert num_gathers(keep=False) == (4 if jax.__version_info__ < (0, 11) else 8)
    assert num_gathers(keep=True) == 8  # one in the forward, one in the backward
