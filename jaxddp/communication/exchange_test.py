"""What arrives is divided, taken apart and its squares summed, with few sums where a bucket's tensors are small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxddp.communication.exchange import SHARDED, SMALL, WHOLE, Sums, settle
from jaxddp.planning.buckets import TensorSpec, plan_buckets

NUM_RANKS, DENOMINATOR = 4, 8.0
SIZES = {
    "one": [5],
    "two small": [3, 7],
    "many small": [3, 1, 6, 8, 2, 9],
    "many at the limit": [SMALL - 2, SMALL, SMALL + 2],
    "many large": [SMALL, SMALL + 1, SMALL, SMALL],
}


def arrived(sizes, route):
    """A plan of one bucket, the tensors whose sums over ranks have arrived in it, and those sums."""
    specs = [TensorSpec(f"t{index}", (size,), "float32") for index, size in enumerate(sizes)]
    plan = plan_buckets(specs, None)
    values = np.random.default_rng(0)
    tensors = {spec.name: jnp.asarray(values.normal(size=spec.shape), jnp.float32) for spec in specs}
    buffer = route.pack(plan.buckets[0], tensors, NUM_RANKS)
    # The last rank's part is the one that is padded.
    return plan, tensors, Sums((buffer[-1] if route is SHARDED else buffer,), {}, jnp.int32(0), {})


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("route", [WHOLE, SHARDED], ids=["whole", "sharded"])
def test_means_and_their_squares(route, sizes):
    plan, tensors, sums = arrived(sizes, route)
    means, squares, own_squares = settle(sums, plan, NUM_RANKS, route, DENOMINATOR)
    for name, tensor in tensors.items():
        kept = tensor if route is WHOLE else route.own(tensor, NUM_RANKS, NUM_RANKS - 1)
        np.testing.assert_array_equal(means[name], kept / DENOMINATOR)
    expected = sum(np.sum(np.square(np.asarray(mean, np.float64))) for mean in means.values())
    summed, other = (squares, own_squares) if route is WHOLE else (own_squares, squares)
    np.testing.assert_allclose(summed, expected, rtol=2e-5)  # float32: sqrt(65,537 terms) roundings of 6e-8
    assert other == 0


@pytest.mark.parametrize(
    ("sizes", "route", "num_sums"),
    [
        ("one", WHOLE, 1),
        ("two small", WHOLE, 2),
        ("many small", WHOLE, 2),
        ("many at the limit", WHOLE, 2),
        ("many large", WHOLE, 4),
        ("many large", SHARDED, 2),  # a rank keeps a quarter of each
    ],
)
def test_small_tensors_share_a_sum(sizes, route, num_sums):
    # XLA's multi-output fusion, the longest pass of compiling 10,000 tensors, walks the whole program for each sum.
    plan, _, sums = arrived(SIZES[sizes], route)
    program = jax.make_jaxpr(lambda sums: settle(sums, plan, NUM_RANKS, route, DENOMINATOR))(sums)
    assert str(program).count("reduce_sum[") == num_sums
