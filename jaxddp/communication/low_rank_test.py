import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxddp.communication.buckets import Bucket, TensorSpec
from jaxddp.communication.low_rank import (
    Memory,
    factor_buckets,
    first_memory,
    is_worth_it,
    merge_memory,
    orthonormal,
    split_memory,
)


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def gram(basis):
    return np.swapaxes(basis, -1, -2) @ basis


def test_columns_become_orthonormal_and_span_what_they_spanned():
    given = normal(3, 40, 4)  # three matrices at once
    basis = np.asarray(jax.jit(orthonormal)(given))
    # abs: float32 sums of 40 products of numbers of order 1/6.
    np.testing.assert_allclose(gram(basis), np.broadcast_to(np.eye(4), (3, 4, 4)), atol=1e-6)
    np.testing.assert_allclose(basis @ (np.swapaxes(basis, -1, -2) @ given), given, atol=1e-5)


def test_columns_that_are_nearly_parallel_become_orthonormal_all_the_same():
    given = normal(40, 1) + 1e-3 * normal(40, 3, seed=1)
    once, _ = np.linalg.qr(given.astype(np.float64))
    basis = np.asarray(jax.jit(orthonormal)(given))
    np.testing.assert_allclose(gram(basis), np.eye(3), atol=1e-6)  # Gram and Schmidt once: 1e-4
    # Rounding of the given columns, 6e-8, is 1e-3 times larger beside what sets them apart.
    np.testing.assert_allclose(np.abs(np.diag(once.T @ basis)), 1, atol=1e-3)


def test_a_column_that_earlier_ones_make_up_becomes_zeros():
    a, b = normal(40, 1), normal(40, 1, seed=1)
    basis = np.asarray(jax.jit(orthonormal)(np.concatenate([a, 3 * a, np.zeros_like(a), b, a - 2 * b], axis=1)))
    assert [bool(np.any(column)) for column in basis.T] == [True, False, False, True, False]
    np.testing.assert_allclose(gram(basis[:, [0, 3]]), np.eye(2), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scale_does_not_matter(scale):
    given = normal(40, 4)
    # Products of 1e-12 and of 1e12 are far from where float32 ends.
    np.testing.assert_allclose(orthonormal(jnp.asarray(given * np.float32(scale))), orthonormal(given), atol=1e-5)


def test_what_is_worth_factors():
    assert is_worth_it((64, 64), 4) and is_worth_it((8, 8, 64), 4)  # 512 < 4096, all dimensions but the last together
    assert not is_worth_it((64,), 1) and not is_worth_it((), 1) and not is_worth_it((1, 64), 1)
    assert is_worth_it((64, 64), 31) and not is_worth_it((64, 64), 32)  # 32 (64 + 64) = 64 * 64
    assert is_worth_it((64, 64), 4, 7.9) and not is_worth_it((64, 64), 4, 8)


def test_what_travels_of_a_bucket():
    bucket = Bucket((TensorSpec("a", (6, 8), "bfloat16"), TensorSpec("b", (8,), "bfloat16")))
    first, second = factor_buckets(bucket, 2, 1.0)
    assert first.tensors == (TensorSpec("a", (6, 2), "float32"), TensorSpec("b", (8,), "float32"))
    assert second.tensors == (TensorSpec("a", (8, 2), "float32"),)


def test_the_first_memory_depends_on_name_shape_and_dtype_alone():
    memory = first_memory(TensorSpec("a", (6, 8), "float64"), 2)
    again, other = (first_memory(TensorSpec(name, (6, 8), "float64"), 2) for name in "ab")
    assert memory.error.shape == (6, 8) and not memory.error.any()
    assert memory.factor.shape == (8, 2) and np.linalg.matrix_rank(memory.factor) == 2
    np.testing.assert_array_equal(memory.factor, again.factor)
    assert not np.any(memory.factor == other.factor)
    assert {leaf.dtype for leaf in first_memory(TensorSpec("a", (6, 8), "bfloat16"), 2)} == {np.dtype("float32")}


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_memory_moves_between_numbers_of_ranks(num_ranks):
    factor = np.broadcast_to(normal(5, 2), (4, 5, 2))
    merged = merge_memory({"a": Memory(normal(4, 6, 5), factor)})
    split = split_memory(merged, num_ranks)["a"]
    assert split.error.shape == (num_ranks, 6, 5)
    assert split.factor.shape == (num_ranks, 5, 2)
    # What all ranks lack together stays; divided and added again, it is off by a rounding for each rank.
    np.testing.assert_allclose(split.error.sum(0), normal(4, 6, 5).sum(0), atol=1e-5)
    np.testing.assert_array_equal(split.factor, np.broadcast_to(normal(5, 2), (num_ranks, 5, 2)))
