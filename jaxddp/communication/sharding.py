"""How tensors are cut into shards: rank r of N holds part r of each.

A tensor is cut along the first dimension that N divides, so that all shards together are the tensor itself. Where N
divides none, it is flattened and padded with zeros to N chunks of c = ceil(n / N).

    tensor        shard on each rank       all shards as one array
    ------------  -----------------------  ------------------------------------------
    [a, b]        [a / N, b]               [a, b], split along the first dimension
    [a, b]        [a, b / N]               [a, b], split along the second one
    [a, b]        [1, c], padded           [1, N c], split along the last dimension

A shard has as many dimensions as its tensor, so a mask by ``ndim > 1`` selects the same parameters. Row r of a
bucket's buffer, ``[N, width]``, holds the shards of rank r, flat.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .buckets import chunk_elements
from .collectives import all_reduce, reduce_scatter


@dataclass(frozen=True)
class Cut:
    """How one tensor is cut."""

    shape: tuple[int, ...]  # of the full tensor
    num_ranks: int
    dim: int | None  # that is split; None if the tensor is flattened and padded
    chunk = cached_property(lambda self: math.prod(self.shard_shape))  # elements of a shard, padding included

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of a shard, of at least one dimension."""
        if self.dim is None:
            return (*(1,) * (len(self.shape) - 1), chunk_elements(math.prod(self.shape), self.num_ranks))
        return (*self.shape[: self.dim], self.shape[self.dim] // self.num_ranks, *self.shape[self.dim + 1 :])

    def to_rows(self, tensor: jax.Array) -> jax.Array:
        """Cuts a full tensor into the flat shards of all ranks, ``[N, chunk]``."""
        numpy = np if isinstance(tensor, np.ndarray) else jnp
        if self.dim is not None:
            front, back = self.shape[: self.dim], self.shape[self.dim + 1 :]
            apart = tensor.reshape(*front, self.num_ranks, self.shard_shape[self.dim], *back)
            return numpy.moveaxis(apart, self.dim, 0).reshape(self.num_ranks, self.chunk)
        padding = self.num_ranks * self.chunk - math.prod(self.shape)
        return numpy.pad(tensor.reshape(-1), (0, padding)).reshape(self.num_ranks, self.chunk)

    def from_rows(self, rows: jax.Array) -> jax.Array:
        """Undoes ``to_rows``."""
        if self.dim is not None:
            numpy = np if isinstance(rows, np.ndarray) else jnp
            return numpy.moveaxis(rows.reshape(self.num_ranks, *self.shard_shape), 0, self.dim).reshape(self.shape)
        return rows.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def local_shard(self, tensor: jax.Array, rank: jax.Array | int) -> jax.Array:
        """Cuts out a rank's shard of a full tensor, of ``shard_shape``."""
        if self.dim is not None:
            size = self.shard_shape[self.dim]
            return lax.dynamic_slice_in_dim(tensor, rank * size, size, self.dim)
        return lax.dynamic_index_in_dim(self.to_rows(tensor), rank, keepdims=False).reshape(self.shard_shape)


Cuts = Mapping[Any, Cut]
"""By name or number, of what is packed into one buffer, in its order."""


def cut(shape: Sequence[int], num_ranks: int, dims: Iterable[int] | None = None) -> Cut:
    """Cuts along the first of some dimensions, or of all, that N divides; flat and padded where it divides none."""
    shape = tuple(shape)
    found = (dim for dim in (range(len(shape)) if dims is None else dims) if shape[dim] % num_ranks == 0)
    return Cut(shape, num_ranks, next(found, None))


def pack_rows(tensors: Any, cuts: Cuts) -> jax.Array:
    """Packs full tensors into ``[N, width]``: row r holds the shards of rank r."""
    return _joined([cut.to_rows(tensors[name]) for name, cut in cuts.items()])


def unpack_rows(rows: jax.Array, cuts: Cuts) -> dict[Any, jax.Array]:
    """Undoes ``pack_rows``."""
    return {name: cuts[name].from_rows(part) for name, part in _split(rows, cuts).items()}


def pack_row(shards: Any, cuts: Cuts) -> jax.Array:
    """Packs one rank's shards into ``[1, width]``."""
    return _joined([shards[name].reshape(1, -1) for name in cuts])


def unpack_row(row: jax.Array, cuts: Cuts) -> dict[Any, jax.Array]:
    """Undoes ``pack_row``, of ``[width]`` as well."""
    return {name: part.reshape(cuts[name].shard_shape) for name, part in _split(row, cuts).items()}


def scatter_sum(x: jax.Array, axis: str, replica_axes: tuple[str, ...] = ()) -> jax.Array:
    """A reduce-scatter ``[N k, ...] -> [k, ...]`` along the axis, and an all-reduce along those of replicas."""
    part = reduce_scatter(x, axis)
    return all_reduce(part, replica_axes) if replica_axes else part


def _joined(rows: list[jax.Array]) -> jax.Array:
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)


def _split(buffer: jax.Array, cuts: Cuts) -> dict[Any, jax.Array]:
    ends = itertools.accumulate(cut.chunk for cut in cuts.values())
    return {name: buffer[..., end - cut.chunk : end] for (name, cut), end in zip(cuts.items(), ends, strict=True)}
