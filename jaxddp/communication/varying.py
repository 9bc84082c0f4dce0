"""Whether arrays may differ between ranks, as ``jax.shard_map(check_vma=True)`` follows it through a trace."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


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
