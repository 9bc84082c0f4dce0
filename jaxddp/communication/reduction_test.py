"""What arrives is divided, taken apart and its squares summed, with few sums where a bucket's tensors are small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxddp.communication.buckets import TensorSpec, plan_buckets
from jaxddp.communication.reduction import ALL_REDUCE, REDUCE_SCATTER, SMALL, Reduction, finish_reduction

pytestmark = pytest.mark.smoke

NUM_RANKS, DENOMINATOR = 4, 8.0
SIZES = {
    "one": [5],
    "two small": [3, 7],
    "many small": [3, 1, 6, 8, 2, 9],
    "many at the limit": [SMALL - 2, SMALL, SMALL + 2],
    "many large": [SMALL, SMALL + 1, SMALL, SMALL],
}


def arrived(sizes, reduce):
    """A plan of one bucket, the tensors whose sums over ranks have arrived in it, and those sums."""
    specs = [TensorSpec(f"t{index}", (size,), "float32") for index, size in enumerate(sizes)]
    plan = plan_buckets(specs, None)
    values = np.random.default_rng(0)
    tensors = {spec.name: jnp.asarray(values.normal(size=spec.shape), jnp.float32) for spec in specs}
    buffer = reduce.pack(plan.buckets[0], tensors, NUM_RANKS)
    # The last rank's part is the one that is padded.
    return plan, tensors, Reduction((buffer[-1] if reduce is REDUCE_SCATTER else buffer,), {}, jnp.int32(0), {})


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("reduce", [ALL_REDUCE, REDUCE_SCATTER], ids=["whole", "sharded"])
def test_means_and_their_squares(reduce, sizes):
    plan, tensors, sums = arrived(sizes, reduce)
    means, replicated_squares, shard_squares = finish_reduction(sums, plan, NUM_RANKS, reduce, DENOMINATOR)
    for name, tensor in tensors.items():
        kept = tensor if reduce is ALL_REDUCE else reduce.local_shard(tensor, NUM_RANKS, NUM_RANKS - 1)
        np.testing.assert_array_equal(means[name], kept / DENOMINATOR)
    expected = sum(np.sum(np.square(np.asarray(mean, np.float64))) for mean in means.values())
    summed, other = replicated_squares, shard_squares
    if reduce is REDUCE_SCATTER:
        summed, other = other, summed
    np.testing.assert_allclose(summed, expected, rtol=2e-5)  # float32: sqrt(65,537 terms) roundings of 6e-8
    assert other == 0


@pytest.mark.parametrize(
    ("sizes", "reduce", "num_sums"),
    [
        ("one", ALL_REDUCE, 1),
        ("two small", ALL_REDUCE, 2),
        ("many small", ALL_REDUCE, 2),
        ("many at the limit", ALL_REDUCE, 2),
        ("many large", ALL_REDUCE, 4),
        ("many large", REDUCE_SCATTER, 2),  # a rank keeps a quarter of each
    ],
)
def test_small_tensors_share_a_sum(sizes, reduce, num_sums):
    # XLA's multi-output fusion, the longest pass of compiling 10,000 tensors, walks the whole program for each sum.
    plan, _, sums = arrived(SIZES[sizes], reduce)
    program = jax.make_jaxpr(lambda sums: finish_reduction(sums, plan, NUM_RANKS, reduce, DENOMINATOR))(sums)
    assert str(program).count("reduce_sum[") == num_sums
