"""Ranks along one mesh axis, or along several.

JAX's collectives take the name of an axis or a tuple of names, and number the ranks of a tuple in its order. Of a tuple
such as ``("replica", "data")``, state is sharded along the last axis and replicated along the others.
"""

from __future__ import annotations

import jax

from .collectives import Axis, all_reduce, reduce_scatter


def shard_axis(axis: Axis) -> str:
    """The mesh axis along which state is sharded.

    Example:
        >>> shard_axis("data"), shard_axis(("replica", "data"))
        ('data', 'data')
    """
    return axis if isinstance(axis, str) else axis[-1]


def replica_axes(axis: Axis) -> tuple[str, ...]:
    """The mesh axes along which sharded state is replicated; none of a single axis."""
    return () if isinstance(axis, str) else axis[:-1]


def scatter_sum(x: jax.Array, axis: Axis) -> jax.Array:
    """Sums ``[N k, ...]`` over all ranks; the r-th of the N ranks along the shard axis gets part r, ``[k, ...]``.

    It is a reduce-scatter along the shard axis, and an all-reduce of the part along the others, if there are any.
    """
    part, replicas = reduce_scatter(x, shard_axis(axis)), replica_axes(axis)
    return all_reduce(part, replicas) if replicas else part
