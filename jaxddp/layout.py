"""Where one leaf of a training state lies: full on every rank, or cut into shards; and along other axes of the mesh.

One that is flattened and padded is laid out rank by rank and, where other axes split it, block by block.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .communication.collectives import Axis
from .communication.sharding import Cut, cut


@dataclass(frozen=True)
class Leaf:
    """Where one leaf lies."""

    shape: tuple[int, ...]  # of the full leaf
    dtype: Any
    cut: Cut | None = None  # how it, or each of its blocks, is cut into shards; None if every rank has all of it
    spec: PartitionSpec = PartitionSpec()  # how it is split along the mesh axes that are not of ranks
    counts: tuple[int, ...] = ()  # of its blocks along each dimension; empty if it is not split

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of a block."""
        counts = self.counts or (1,) * len(self.shape)
        return tuple(size // count for size, count in zip(self.shape, counts, strict=True))

    @property
    def is_padded(self) -> bool:
        """Whether it is flattened and padded."""
        return self.cut is not None and self.cut.dim is None

    @property
    def held(self) -> jax.ShapeDtypeStruct:
        """The array over all ranks."""
        return self._of_ranks(self.cut.num_ranks if self.cut else 1)

    @property
    def on_rank(self) -> jax.ShapeDtypeStruct:
        """One rank's part, of all its devices."""
        return self._of_ranks(1)

    def _of_ranks(self, num_ranks: int) -> jax.ShapeDtypeStruct:
        shape, cut = [*self.shape], self.cut
        if cut is not None:
            if cut.dim is None:
                shape = [*cut.shard_shape[:-1], num_ranks * cut.chunk * math.prod(self.counts)]
            else:
                shape[cut.dim] = shape[cut.dim] // cut.num_ranks * num_ranks
        return jax.ShapeDtypeStruct(tuple(shape), self.dtype)

    @property
    def bytes_on_rank(self) -> int:
        """Bytes of one rank's part."""
        return self.on_rank.size * self.on_rank.dtype.itemsize

    @cached_property
    def shard_spec(self) -> PartitionSpec:
        """How a shard lies along the other axes."""
        if not self.is_padded or not any(self.spec):
            return self.spec
        return PartitionSpec(*(None,) * (len(self.held.shape) - 1), tuple(jax.tree.leaves(tuple(self.spec))))

    def rank_spec(self, axis: Axis) -> PartitionSpec:
        """How the array lies over the ranks, for ``shard_map``."""
        if self.cut is None:
            return PartitionSpec()
        dim = len(self.cut.shard_shape) - 1 if self.cut.dim is None else self.cut.dim
        return PartitionSpec(*(None,) * dim, axis if isinstance(axis, str) else axis[-1])

    def sharding(self, mesh: Mesh | AbstractMesh, axis: Axis) -> NamedSharding:
        """How the array lies over the mesh."""
        specs = itertools.zip_longest(self.rank_spec(axis), self.shard_spec)
        dims = [tuple(jax.tree.leaves(axes)) or None for axes in specs]
        while dims and dims[-1] is None:
            dims.pop()
        return NamedSharding(mesh, PartitionSpec(*(dim[0] if dim and len(dim) == 1 else dim for dim in dims)))

    def to_global(self, tensor: Any) -> Any:
        """Lays a full leaf out as the array over all ranks."""
        if not self.is_padded:
            return tensor
        assert self.cut is not None
        numpy = np if isinstance(tensor, np.ndarray) else jnp
        blocks = [tensor]
        for dim, count in enumerate(self.counts):
            blocks = [part for block in blocks for part in numpy.split(block, count, dim)]
        return numpy.stack([self.cut.to_rows(block) for block in blocks], axis=1).reshape(self.held.shape)

    def from_global(self, array: Any) -> Any:
        """Undoes ``to_global``."""
        if not self.is_padded:
            return array
        assert self.cut is not None
        numpy = np if isinstance(array, np.ndarray) else jnp
        rows = array.reshape(self.cut.num_ranks, math.prod(self.counts), -1)
        blocks = [self.cut.from_rows(rows[:, place]) for place in range(rows.shape[1])]
        for dim, count in reversed([*enumerate(self.counts)]):
            blocks = [numpy.concatenate(blocks[at : at + count], dim) for at in range(0, len(blocks), count)]
        return blocks[0]


def whole(tree: Any) -> Any:
    """The layout of arrays that every rank has all of: a tree of ``Leaf``."""
    return jax.tree.map(lambda leaf: Leaf(tuple(leaf.shape), leaf.dtype), tree)


def cut_leaves(params: Any, num_shards: int) -> Any:
    """Cuts every parameter: along its first dimension that other axes do not split."""
    return jax.tree.map(lambda leaf: cut_leaf(leaf, num_shards, range(len(leaf.shape))), params)


def cut_leaf(leaf: Leaf, num_shards: int, dims: Iterable[int]) -> Leaf:
    """Cuts a parameter along the first of some dimensions that the ranks divide and other axes do not split."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # PRNG keys have no elements to deal out
        return leaf
    split = {dim for dim, axes in enumerate(leaf.spec) if axes}
    return replace(leaf, cut=cut(leaf.block, num_shards, [dim for dim in dims if dim not in split]))
