"""Matrices as products of two thin ones: the arithmetic of PowerSGD.

For an n x m matrix of gradients G, a rank sends a basis of its column space (k columns of n numbers) and G's
coordinates in it (k columns of m). It keeps the error and adds it to the next step's gradients. The next step starts
from the second factor, so that over the steps the basis turns towards the largest singular directions (subspace
iteration). N is the number of ranks; sums over ranks are divided by D.

    ========= ========== ===================================================== =========================
    tensor    on a rank
    ========= ========== ===================================================== =========================
    M[r]      ``[n, m]`` G[r] + D error[r]
    P         ``[n, k]`` sum over ranks of M[r] factor                          sent, in one all-reduce
    basis     ``[n, k]`` orthonormal(P)                                         the same on every rank
    S         ``[m, k]`` sum over ranks of M[r]' basis                          sent, in one all-reduce
    total     ``[n, m]`` basis S', for the sum of M[r]                          the same on every rank
    error[r]  ``[n, m]`` (M[r] - total / N) / D                                 kept, its own
    factor    ``[m, k]`` orthonormal(S)                                         kept, the same on every rank
    ========= ========== ===================================================== =========================

The error is in units of the averaged gradient: the sum of all ranks' errors is the gradient still to be applied, for
any number of ranks and any weights of the batches. A single rank sends nothing and adds the error that it finds to its
gradients. All is computed at least in float32.

References:
    Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
    NeurIPS 2019, arXiv:1905.13727.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .buckets import Bucket, TensorSpec
from .buffers import pack, unpack


class Memory(NamedTuple):
    """A rank's state of one matrix; for all ranks together, with a leading dimension ``num_ranks``.

    Attributes:
        error: Of the parameter's shape; the rank's own.
        factor: ``[m, k]``; the same on every rank.
    """

    error: Any
    factor: Any


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix shape used to factor a tensor: its last dimension, the outputs of JAX's layers, against all others.

    Args:
        shape: Of the tensor; a vector is one row.

    Returns:
        Rows n and columns m.

    Example:
        >>> matrix_shape((3, 3, 16, 32)), matrix_shape((5,)), matrix_shape(())
        ((144, 32), (1, 5), (1, 1))
    """
    return math.prod(shape[:-1]), math.prod(shape[-1:])


def is_worth_it(shape: tuple[int, ...], num_columns: int, min_compression: float = 1.0) -> bool:
    """Whether the factors are smaller than the tensor: ``k (n + m) min_compression < n m``.

    False for vectors and scalars, whatever k.
    """
    n, m = matrix_shape(shape)
    return num_columns * (n + m) * min_compression < n * m


def first_memory(tensor: TensorSpec, num_columns: int) -> Memory:
    """The state before the first step: no error, and random columns seeded by the tensor's name.

    Returns:
        NumPy arrays; the error is a broadcast zero and takes no memory.
    """
    dtype = jnp.promote_types(tensor.dtype, jnp.float32)
    _, m = matrix_shape(tensor.shape)
    factor = np.random.default_rng(zlib.crc32(tensor.name.encode())).standard_normal((m, num_columns))
    return Memory(np.broadcast_to(np.zeros((), dtype), tensor.shape), factor.astype(dtype))


def orthonormal(matrices: jax.Array) -> jax.Array:
    """Makes the columns of ``[..., n, k]`` orthonormal by Gram-Schmidt.

    A column that is a combination of earlier ones, up to rounding, becomes zero: normalised, it would be noise.
    """
    *_, n, k = matrices.shape
    least = 10 * math.sqrt(n) * jnp.finfo(matrices.dtype).eps  # n roundings add up to sqrt(n) eps

    def length(column: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(column), axis=-2, keepdims=True))

    def add_column(j: jax.Array, basis: jax.Array) -> jax.Array:
        given = column = lax.dynamic_slice_in_dim(matrices, j, 1, axis=-1)
        for _ in range(2):  # the second pass removes what rounding left
            column = column - _product(basis, _product(basis.mT, column))
        is_new = length(column) > least * length(given)
        column = jnp.where(is_new, column / jnp.where(is_new, length(column), 1), 0)
        return lax.dynamic_update_slice_in_dim(basis, column, j, axis=-1)

    return lax.fori_loop(0, k, add_column, jnp.zeros_like(matrices))


def factor_buckets(bucket: Bucket, num_columns: int, min_compression: float) -> tuple[Bucket, Bucket]:
    """Plans the two buffers that are sent for a bucket.

    Returns:
        The bucket of all P and of the tensors that are sent unfactored; the bucket of all S, which may be empty.
    """
    dtype = str(jnp.promote_types(bucket.dtype, jnp.float32))
    first, second = [], []
    for tensor in bucket.tensors:
        n, m = matrix_shape(tensor.shape)
        is_factored = is_worth_it(tensor.shape, num_columns, min_compression)
        first.append(TensorSpec(tensor.name, (n, num_columns) if is_factored else tensor.shape, dtype))
        if is_factored:
            second.append(TensorSpec(tensor.name, (m, num_columns), dtype))
    return Bucket(tuple(first)), Bucket(tuple(second))


def sum_by_factors(
    tensors: Mapping[str, jax.Array],
    memory: Mapping[str, Memory],
    buckets: tuple[Bucket, Bucket],
    send: Callable[[jax.Array], jax.Array],
    num_ranks: int,
    denominator: jax.Array | float,
) -> tuple[dict[str, jax.Array], dict[str, Memory]]:
    """Sums the tensors of a bucket over ranks, matrices approximately.

    Returns:
        The sums by name, and the next state; in the dtypes they had.
    """
    first, second = buckets
    wide = {tensor.name: tensors[tensor.name].astype(tensor.dtype) for tensor in first.tensors}
    matrices, factors = {}, {}
    for name, _, dtype in second.tensors:
        given = wide[name] + (denominator * memory[name].error).astype(dtype)
        matrices[name] = given.reshape(matrix_shape(given.shape))
        factors[name] = memory[name].factor.astype(dtype)
    projected = {name: _product(matrix, factors[name]) for name, matrix in matrices.items()}
    arrived = unpack(first, send(pack(first, wide | projected)))
    if not second.tensors:
        return {name: total.astype(tensors[name].dtype) for name, total in arrived.items()}, {}
    bases = _of_each_shape(orthonormal, {name: arrived[name] for name in matrices})
    sums = unpack(second, send(pack(second, {name: _product(m.mT, bases[name]) for name, m in matrices.items()})))
    turned = _of_each_shape(orthonormal, sums)
    changed = {}
    for name, matrix in matrices.items():
        total = _product(bases[name], sums[name].mT)
        before = memory[name]
        error = ((matrix - total / num_ranks) / denominator).reshape(before.error.shape)
        # A zero column would stay zero at every later step.
        factor = jnp.where(jnp.any(turned[name] != 0, axis=0), turned[name], factors[name])
        changed[name] = Memory(error.astype(before.error.dtype), factor.astype(before.factor.dtype))
        arrived[name] = total.reshape(before.error.shape)
    return {name: total.astype(tensors[name].dtype) for name, total in arrived.items()}, changed


def apply_residual(
    tensors: Mapping[str, jax.Array], memory: Mapping[str, Memory], denominator: jax.Array | float
) -> tuple[dict[str, jax.Array], dict[str, Memory]]:
    """Single-rank case: adds the error saved by earlier steps on several ranks to the gradients.

    Returns:
        The gradients, in the dtypes they had, and the next state, whose errors are zero.
    """
    corrected = dict(tensors)
    for name, one in memory.items():
        corrected[name] = (tensors[name] + denominator * one.error).astype(tensors[name].dtype)
    return corrected, {name: one._replace(error=jnp.zeros_like(one.error)) for name, one in memory.items()}


def merge_memory(memory: dict[str, Memory]) -> dict[str, Memory]:
    """Merges all ranks' states into one, to be saved: the sum of their errors, and the factors, which are equal."""
    return {name: Memory(jnp.sum(all_.error, axis=0), all_.factor[0]) for name, all_ in memory.items()}


def split_memory(merged: dict[str, Memory], num_ranks: int) -> dict[str, Memory]:
    """Undoes ``merge_memory`` for any number of ranks: each takes an equal part of the error."""

    def on_all(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array, (num_ranks, *array.shape))

    return {name: Memory(on_all(one.error / num_ranks), on_all(one.factor)) for name, one in merged.items()}


def _of_each_shape(
    function: Callable[[jax.Array], jax.Array], matrices: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Applies a function of ``[..., n, k]`` to matrices, stacking those of one shape: it is many small operations."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, matrix in matrices.items():
        names.setdefault(matrix.shape, []).append(name)
    found: dict[str, jax.Array] = {}
    for alike in names.values():
        found.update(zip(alike, function(jnp.stack([matrices[name] for name in alike])), strict=True))
    return found


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # Accelerators multiply in fewer bits by default, and columns would not be orthogonal.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
