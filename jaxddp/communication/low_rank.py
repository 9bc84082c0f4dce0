"""Matrices as products of two thin ones: the arithmetic of PowerSGD.

What travels of an n x m matrix of gradients G is a basis of what it maps to, and what it is in that basis: k columns of
n numbers, then k of m. A rank keeps the error, what it could not send, and adds it to the gradients of the next step;
the second factor is where the next step starts, so that over the steps the bases turn towards the largest directions,
as subspace iteration has it. N is the number of ranks, D what sums over ranks are divided by.

    ========= ========== ===================================================== =========================
    tensor    on a rank
    ========= ========== ===================================================== =========================
    M[r]      ``[n, m]`` G[r] + D error[r]
    P         ``[n, k]`` sum over ranks of M[r] factor                          travels, in one all-reduce
    basis     ``[n, k]`` orthonormal(P)                                         the same on every rank
    S         ``[m, k]`` sum over ranks of M[r]' basis                          travels, in one all-reduce
    total     ``[n, m]`` basis S', for the sum of M[r]                          the same on every rank
    error[r]  ``[n, m]`` (M[r] - total / N) / D                                 kept, its own
    factor    ``[m, k]`` orthonormal(S)                                         kept, the same on every rank
    ========= ========== ===================================================== =========================

The error is in units of the averaged gradient, so the errors of all ranks together are what training still lacks, on
however many ranks it goes on, and whatever weights the batches have. One rank alone sends nothing: it adds what it
finds lacking to its gradients. All is computed at least in float32.

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

from ..planning.buckets import Bucket, TensorSpec
from .buckets import pack, unpack


class Memory(NamedTuple):
    """What a rank remembers of one matrix; of all ranks, each with a leading dimension ``num_ranks``.

    Attributes:
        error: Of the parameter's shape; the rank's own.
        factor: ``[m, k]``; the same on every rank.
    """

    error: Any
    factor: Any


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Says as what matrix a tensor is seen: its last dimension counts columns, as outputs do in JAX's layers.

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
    """Whether two factors are that much smaller than the tensor: k (n + m) times ``min_compression`` below n m.

    Args:
        shape: Of the tensor.
        num_columns: k.
        min_compression: At least 1.

    Returns:
        False for vectors and scalars, which are their own smallest factor.
    """
    n, m = matrix_shape(shape)
    return num_columns * (n + m) * min_compression < n * m


def first_memory(tensor: TensorSpec, num_columns: int) -> Memory:
    """Makes what a rank remembers before the first step: no error, and columns that only the name decides.

    Args:
        tensor: The parameter.
        num_columns: k.

    Returns:
        Arrays of NumPy; the error takes no memory yet.
    """
    dtype = jnp.promote_types(tensor.dtype, jnp.float32)
    _, m = matrix_shape(tensor.shape)
    factor = np.random.default_rng(zlib.crc32(tensor.name.encode())).standard_normal((m, num_columns))
    return Memory(np.broadcast_to(np.zeros((), dtype), tensor.shape), factor.astype(dtype))


def orthonormal(matrices: jax.Array) -> jax.Array:
    """Makes columns orthonormal, one after the other, as Gram and Schmidt do.

    A column that is a combination of earlier ones, up to rounding, becomes zeros: normalised, it would be noise.

    Args:
        matrices: ``[..., n, k]``.

    Returns:
        The same shape.
    """
    *_, n, k = matrices.shape
    least = 10 * math.sqrt(n) * jnp.finfo(matrices.dtype).eps  # of a column of n roundings

    def length(column: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(column), axis=-2, keepdims=True))

    def add_column(j: jax.Array, basis: jax.Array) -> jax.Array:
        given = column = lax.dynamic_slice_in_dim(matrices, j, 1, axis=-1)
        for _ in range(2):  # rounding leaves of the earlier columns what a second time removes
            column = column - _product(basis, _product(basis.mT, column))
        is_new = length(column) > least * length(given)
        column = jnp.where(is_new, column / jnp.where(is_new, length(column), 1), 0)
        return lax.dynamic_update_slice_in_dim(basis, column, j, axis=-1)

    return lax.fori_loop(0, k, add_column, jnp.zeros_like(matrices))


def factor_buckets(bucket: Bucket, num_columns: int, min_compression: float) -> tuple[Bucket, Bucket]:
    """Says what travels for a bucket.

    Args:
        bucket: The bucket.
        num_columns: k.
        min_compression: As for ``is_worth_it``.

    Returns:
        The bucket of all P, with the tensors that are not worth factors as they are; and that of all S, empty if
        there are none.
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
    """Sums the tensors of a bucket over ranks.

    Args:
        tensors: This rank's, by name.
        memory: This rank's of each that has factors.
        buckets: From ``factor_buckets``.
        send: Sums a buffer over ranks.
        num_ranks: N.
        denominator: D, what the sum will be divided by.

    Returns:
        The sums by name, as far as they have travelled, and what is remembered now; both of the dtypes they had.
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
    remembered = {}
    for name, matrix in matrices.items():
        total = _product(bases[name], sums[name].mT)
        before = memory[name]
        error = ((matrix - total / num_ranks) / denominator).reshape(before.error.shape)
        # A column of zeros would stay one for ever.
        factor = jnp.where(jnp.any(turned[name] != 0, axis=0), turned[name], factors[name])
        remembered[name] = Memory(error.astype(before.error.dtype), factor.astype(before.factor.dtype))
        arrived[name] = total.reshape(before.error.shape)
    return {name: total.astype(tensors[name].dtype) for name, total in arrived.items()}, remembered


def pay_back(
    tensors: Mapping[str, jax.Array], memory: Mapping[str, Memory], denominator: jax.Array | float
) -> tuple[dict[str, jax.Array], dict[str, Memory]]:
    """Adds to the tensors of an only rank, which sends nothing, what several ranks have left out before it.

    Args:
        tensors: By name.
        memory: Of some of them.
        denominator: D.

    Returns:
        The tensors, of the dtypes they had, and what is remembered now: the factors.
    """
    paid = dict(tensors)
    for name, one in memory.items():
        paid[name] = (tensors[name] + denominator * one.error).astype(tensors[name].dtype)
    return paid, {name: one._replace(error=jnp.zeros_like(one.error)) for name, one in memory.items()}


def merge_memory(memory: dict[str, Memory]) -> dict[str, Memory]:
    """Makes one of what all ranks remember, to be saved: what they lack together, and the factors, which are equal.

    Args:
        memory: As ``TrainState`` has it, each array with a leading dimension ``num_ranks``.

    Returns:
        The same without that dimension.
    """
    return {name: Memory(jnp.sum(all_.error, axis=0), all_.factor[0]) for name, all_ in memory.items()}


def split_memory(merged: dict[str, Memory], num_ranks: int) -> dict[str, Memory]:
    """Undoes ``merge_memory`` for any number of ranks: each takes an equal part of what is lacking.

    Args:
        merged: From ``merge_memory``.
        num_ranks: Number of ranks.

    Returns:
        As ``TrainState`` has it.
    """

    def on_all(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array, (num_ranks, *array.shape))

    return {name: Memory(on_all(one.error / num_ranks), on_all(one.factor)) for name, one in merged.items()}


def _of_each_shape(
    function: Callable[[jax.Array], jax.Array], matrices: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Applies a function of ``[..., n, k]`` to matrices, to those of one shape at once: it is many small operations."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, matrix in matrices.items():
        names.setdefault(matrix.shape, []).append(name)
    found: dict[str, jax.Array] = {}
    for alike in names.values():
        found.update(zip(alike, function(jnp.stack([matrices[name] for name in alike])), strict=True))
    return found


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # By default accelerators multiply in fewer bits, and columns would not be orthogonal.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
