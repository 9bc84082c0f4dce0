"""How tensors are cut into shards: leaf by leaf, one chunk a rank.

A tensor is flattened, padded with zeros to a multiple of the number of ranks N, and rank r owns chunk r. Every leaf
keeps its place in the tree, so an optimizer sees the user's structure. Chunks of many leaves are communicated together:
row r of a bucket's buffer holds rank r's chunks.

    leaf    [n]         padded to [N c], c = ceil(n / N)           chunk r = elements r c ... (r + 1) c
    bucket  [N, width]  row r = chunk r of each of its tensors     width = sum of their c
    scatter [width]     = reduce-scatter of [N, width] along dimension 0
    gather  [N, width]  = all-gather of [width]

A stack of layers for a scan is cut by rows instead: each entry of dimension 0 is flattened, padded and cut separately,
so that one layer can be gathered without the others.

``Cut`` cuts one tensor; the functions pack and unpack a bucket of them.

A shard has as many dimensions as its tensor, all of length 1 but the last: ``[1, ..., 1, c]``, by rows
``[rows, 1, ..., 1, c]``. So a mask by number of dimensions, as for weight decay, selects the same parameters on shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from .buckets import Bucket, chunk_elements


def pack_chunks(bucket: Bucket, tensors: Mapping[str, jax.Array], num_ranks: int) -> jax.Array:
    """Packs the chunks of a bucket's tensors, rank by rank.

    Args:
        bucket: The bucket.
        tensors: Full arrays by name, at least those of the bucket.
        num_ranks: Number of ranks.

    Returns:
        A buffer of shape ``[num_ranks, width]``; rank r owns row r.
    """
    chunks = [Cut(tensor.shape, num_ranks).to_chunks(tensors[tensor.name]) for tensor in bucket.tensors]
    return jnp.concatenate(chunks, axis=1)


def pack_local_shards(bucket: Bucket, chunks: Mapping[str, jax.Array]) -> jax.Array:
    """Concatenates one rank's chunks of a bucket's tensors.

    Returns:
        A buffer of shape ``[width]``.
    """
    return jnp.concatenate([chunks[tensor.name] for tensor in bucket.tensors])


def unpack_chunks(bucket: Bucket, buffer: jax.Array) -> dict[str, jax.Array]:
    """Undoes ``pack_chunks``.

    Returns:
        Full arrays by name, each of its tensor's shape, without padding.
    """
    num_ranks = buffer.shape[0]
    chunks = split_chunks(bucket, buffer, num_ranks)
    return {tensor.name: Cut(tensor.shape, num_ranks).from_chunks(chunks[tensor.name]) for tensor in bucket.tensors}


def split_chunks(bucket: Bucket, row: jax.Array, num_ranks: int) -> dict[str, jax.Array]:
    """Splits one rank's row of a bucket, ``[..., width]``, into chunks.

    Returns:
        Chunks by name, each of shape ``[..., c]``.
    """
    found, offset = {}, 0
    for tensor in bucket.tensors:
        chunk = chunk_elements(tensor.num_elements, num_ranks)
        found[tensor.name] = row[..., offset : offset + chunk]
        offset += chunk
    return found


@dataclass(frozen=True)
class Blocks:
    """How one tensor is split over devices along mesh axes that are not of ranks, in blocks that are cut separately.

    Attributes:
        spec: Along those axes.
        counts: Number of blocks along each dimension.

    Example:
        >>> Blocks(PartitionSpec(None, "model"), (1, 2)).shape_of((3, 8))
        (3, 4)
    """

    spec: PartitionSpec
    counts: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes, in the order of the blocks."""
        return tuple(jax.tree.leaves(tuple(self.spec)))

    @property
    def shard_spec(self) -> PartitionSpec:
        """How the blocks' shards lie along those axes: one after another, along the last dimension."""
        return PartitionSpec(*(None,) * (len(self.counts) - 1), self.axes)

    def of_last(self, ndim: int) -> Blocks:
        """How a row is split: the last dimensions, if the others are not split."""
        first = len(self.counts) - ndim
        return Blocks(PartitionSpec(*self.spec[first:]), self.counts[first:])

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a block of a full tensor."""
        return tuple(size // count for size, count in zip(shape, self.counts, strict=True))

    def split(self, tensor: jax.Array) -> jax.Array:
        """Splits a full tensor, into ``[num_blocks, *block]``."""
        dims, block = len(self.counts), self.shape_of(tensor.shape)
        pairs = tensor.reshape([size for pair in zip(self.counts, block, strict=True) for size in pair])
        return pairs.transpose(*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)).reshape(-1, *block)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Undoes ``split``."""
        dims = len(self.counts)
        apart = blocks.reshape(*self.counts, *blocks.shape[1:])
        pairs = apart.transpose([dim for pair in zip(range(dims), range(dims, 2 * dims), strict=True) for dim in pair])
        return pairs.reshape([count * size for count, size in zip(self.counts, blocks.shape[1:], strict=True)])


@dataclass(frozen=True)
class Cut:
    """How one tensor is cut.

    Attributes:
        shape: Of the full tensor.
        num_ranks: Number of ranks.
        by_row: Whether each entry of dimension 0 is cut separately.

    Example:
        >>> Cut((3, 5), 4).shard_shape, Cut((), 4).shard_shape, Cut((2, 3, 5), 4, by_row=True).shard_shape
        ((1, 4), (1,), (2, 1, 4))
    """

    shape: tuple[int, ...]
    num_ranks: int
    by_row: bool = False

    @property
    def rows(self) -> int:
        """Number of pieces that are flattened, padded and cut separately."""
        return self.shape[0] if self.by_row else 1

    @property
    def row_elements(self) -> int:
        """Elements of a piece, without padding."""
        return math.prod(self.shape[1:] if self.by_row else self.shape)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one rank's shard: of as many dimensions as the tensor, and at least one."""
        ones = (1,) * (len(self.shape) - 1)
        chunk = chunk_elements(self.row_elements, self.num_ranks)
        return (self.rows, *ones[1:], chunk) if self.by_row else (*ones, chunk)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of all ranks' shards as one array, sharded along its last dimension."""
        *front, chunk = self.shard_shape
        return (*front, self.num_ranks * chunk)

    def spec(self, axis: str) -> PartitionSpec:
        """Sharding over a mesh axis of an array of ``global_shape``, for ``shard_map`` and ``NamedSharding``."""
        return PartitionSpec(*(None,) * (len(self.shard_shape) - 1), axis)

    def to_chunks(self, tensor: jax.Array) -> jax.Array:
        """Cuts a full tensor into the chunks of all ranks, ``[num_ranks, rows * c]``."""
        chunk = self.shard_shape[-1]
        padding = self.num_ranks * chunk - self.row_elements
        pad = np.pad if isinstance(tensor, np.ndarray) else jnp.pad
        rows = pad(tensor.reshape(self.rows, self.row_elements), ((0, 0), (0, padding)))
        return rows.reshape(self.rows, self.num_ranks, chunk).swapaxes(0, 1).reshape(self.num_ranks, self.rows * chunk)

    def from_chunks(self, chunks: jax.Array) -> jax.Array:
        """Undoes ``to_chunks``."""
        by_rank = chunks.reshape(self.num_ranks, self.rows, self.shard_shape[-1])
        rows = by_rank.swapaxes(0, 1).reshape(self.rows, self.num_ranks * self.shard_shape[-1])
        return rows[:, : self.row_elements].reshape(self.shape)

    def local_shard(self, tensor: jax.Array, rank: jax.Array | int) -> jax.Array:
        """Cuts out a rank's shard of a full tensor, of ``shard_shape``."""
        return lax.dynamic_index_in_dim(self.to_chunks(tensor), rank, keepdims=False).reshape(self.shard_shape)

    def without_padding(self, shard: jax.Array, rank: jax.Array | int) -> jax.Array:
        """Zeroes the padding in a rank's shard, ``[..., c]``."""
        chunk = self.shard_shape[-1]
        if self.num_ranks * chunk == self.row_elements:
            return shard
        return jnp.where(rank * chunk + jnp.arange(chunk) < self.row_elements, shard, 0)

    def to_global(self, tensor: jax.Array) -> jax.Array:
        """Concatenates all shards of a full tensor, in ``global_shape``."""
        by_rank = self.to_chunks(tensor).reshape(self.num_ranks, self.rows, self.shard_shape[-1])
        return by_rank.swapaxes(0, 1).reshape(self.global_shape)

    def from_global(self, array: jax.Array) -> jax.Array:
        """Undoes ``to_global``."""
        rows = array.reshape(self.rows, self.num_ranks * self.shard_shape[-1])
        return rows[:, : self.row_elements].reshape(self.shape)
