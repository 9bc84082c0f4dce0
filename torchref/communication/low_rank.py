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
any weights of the batches. All is computed at least in float32.

References:
    Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
    NeurIPS 2019, arXiv:1905.13727.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from jaxddp.communication.buckets import Bucket, TensorSpec

from .buffers import pack, unpack


class Memory(NamedTuple):
    """A rank's state of one matrix.

    Attributes:
        error: Of the parameter's shape; the rank's own.
        factor: ``[m, k]``; the same on every rank.
    """

    error: torch.Tensor
    factor: torch.Tensor


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix shape used to factor a tensor: its first dimension, the outputs of torch's layers, against all others.

    Args:
        shape: Of the tensor; a vector is one column.

    Returns:
        Rows n and columns m.

    Example:
        >>> matrix_shape((32, 16, 3, 3)), matrix_shape((5,)), matrix_shape(())
        ((32, 144), (5, 1), (1, 1))
    """
    return math.prod(shape[:1]), math.prod(shape[1:])


def is_worth_it(shape: tuple[int, ...], num_columns: int, min_compression: float = 1.0) -> bool:
    """Whether two factors are that much smaller than the tensor: k (n + m) times ``min_compression`` below n m.

    False for vectors and scalars, whatever k.
    """
    n, m = matrix_shape(shape)
    return num_columns * (n + m) * min_compression < n * m


def first_memory(tensor: TensorSpec, num_columns: int) -> Memory:
    """The state before the first step: no error, and random columns seeded by the tensor's name."""
    dtype = _at_least_float32(tensor.dtype)
    _, m = matrix_shape(tensor.shape)
    factor = np.random.default_rng(zlib.crc32(tensor.name.encode())).standard_normal((m, num_columns))
    return Memory(torch.zeros(tensor.shape, dtype=dtype), torch.from_numpy(factor).to(dtype))


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Makes the columns of ``[n, k]`` orthonormal by Gram-Schmidt.

    A column that is a combination of earlier ones, up to rounding, becomes zero: normalised, it would be noise.
    """
    n, k = matrix.shape
    least = 10 * math.sqrt(n) * torch.finfo(matrix.dtype).eps  # n roundings add up to sqrt(n) eps
    basis = torch.zeros_like(matrix)
    for j in range(k):
        given = column = matrix[:, j]
        for _ in range(2):  # the second pass removes what rounding left
            column = column - basis @ (basis.T @ column)
        length = column.norm()
        is_new = length > least * given.norm()
        basis[:, j] = torch.where(is_new, column / torch.where(is_new, length, 1), 0)
    return basis


def factor_buckets(bucket: Bucket, num_columns: int, min_compression: float) -> tuple[Bucket, Bucket]:
    """Plans the two buffers that are sent for a bucket.

    Returns:
        The bucket of all P and of the tensors that are sent unfactored; the bucket of all S, which may be empty.
    """
    dtype = str(_at_least_float32(bucket.dtype)).removeprefix("torch.")
    first, second = [], []
    for tensor in bucket.tensors:
        n, m = matrix_shape(tensor.shape)
        is_factored = is_worth_it(tensor.shape, num_columns, min_compression)
        first.append(TensorSpec(tensor.name, (n, num_columns) if is_factored else tensor.shape, dtype))
        if is_factored:
            second.append(TensorSpec(tensor.name, (m, num_columns), dtype))
    return Bucket(tuple(first)), Bucket(tuple(second))


def sum_by_factors(
    tensors: Mapping[str, torch.Tensor],
    memory: Mapping[str, Memory],
    buckets: tuple[Bucket, Bucket],
    send: Callable[[torch.Tensor], torch.Tensor],
    num_ranks: int,
    denominator: float,
) -> tuple[dict[str, torch.Tensor], dict[str, Memory]]:
    """Sums the tensors of a bucket over ranks, matrices approximately.

    ``send`` sums a buffer over ranks, and may overwrite it.

    Returns:
        The sums by name, at least in float32, and the changed part of ``memory``.
    """
    first, second = buckets
    wide = {tensor.name: tensors[tensor.name].to(getattr(torch, tensor.dtype)) for tensor in first.tensors}
    matrices, factors = {}, {}
    for tensor in second.tensors:
        given = wide[tensor.name] + denominator * memory[tensor.name].error
        matrices[tensor.name] = given.reshape(matrix_shape(tuple(given.shape)))
        factors[tensor.name] = memory[tensor.name].factor.to(given.dtype)
    projected = {name: matrix @ factors[name] for name, matrix in matrices.items()}
    arrived = unpack(first, send(pack(first, wide | projected)))
    if not second.tensors:
        return arrived, {}
    bases = {name: orthonormal(arrived[name]) for name in matrices}
    sums = unpack(second, send(pack(second, {name: matrix.T @ bases[name] for name, matrix in matrices.items()})))
    changed = {}
    for name, matrix in matrices.items():
        total = bases[name] @ sums[name].T
        before = memory[name]
        error = ((matrix - total / num_ranks) / denominator).reshape(before.error.shape)
        turned = orthonormal(sums[name])
        # A zero column would stay zero at every later step.
        factor = torch.where((turned != 0).any(dim=0), turned, factors[name])
        changed[name] = Memory(error.to(before.error.dtype), factor.to(before.factor.dtype))
        arrived[name] = total.reshape(before.error.shape)
    return arrived, changed


def _at_least_float32(dtype: str) -> torch.dtype:
    return torch.promote_types(getattr(torch, dtype), torch.float32)
