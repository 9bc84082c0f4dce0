"""Mesh axes, asked for while a rank's program is traced: whose ranks there are, what varies over them, which platform.

JAX's collectives take the name of an axis or a tuple of names, and number the ranks of a tuple in its order. Of a tuple
such as ``("replica", "data")``, state is sharded along the last axis and replicated along the others.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

Axis = str | tuple[str, ...]
"""The name of a mesh axis, or of several, whose ranks are numbered in that order."""


def axis_size(axis: Axis) -> int:
    """Counts the ranks of a mesh axis.

    Raises:
        ValueError: If the caller is not inside of a map over it.
    """
    try:
        return lax.axis_size(axis)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"axis (={axis!r}) must be bound: call this inside jax.shard_map over it") from error


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


def traced_platform() -> str:
    """The platform of the mesh that is being traced for, or else of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def varying(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which an array may vary, or is one of the terms of a sum; none where ``check_vma`` is off."""
    kind = jax.typeof(x)
    if not hasattr(kind, "manual_axis_type"):
        return frozenset(kind.vma)
    return frozenset(kind.manual_axis_type.varying | kind.manual_axis_type.unreduced)


def as_varying(tree: Any, axis: str | tuple[str, ...]) -> Any:
    """Declares arrays different on the ranks of an axis, so that autodiff does not sum their gradients over it."""
    axes = (axis,) if isinstance(axis, str) else axis

    def declare(leaf: jax.Array) -> jax.Array:
        missing = tuple(name for name in axes if name not in varying(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(declare, tree)
