"""Clipping by the global norm for optimizers that run on shards, of which each rank sees only its own.

    norm = sqrt(sum over ranks of sum(shard^2) + sum(replicated^2))        scale = min(1, max_norm / norm)

The sum is taken over ranks inside ``on_shards``, in which optimizers on shards are called, and locally elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .arguments import is_number
from .communication.collectives import all_reduce
from .communication.reduction import sum_of_squares
from .communication.sharding import Cut
from .scopes import METRICS_SCOPE
from .tree import named_leaves

GLOBAL_NORM = "jaxddp_global_norm"  # by which the element-wise check knows the one sum over elements that is allowed

_shards: ContextVar[tuple[str, Mapping[str, Cut | None]] | None] = ContextVar("jaxddp_shards", default=None)
_full: ContextVar[Mapping[str, tuple[int, ...]] | None] = ContextVar("jaxddp_full", default=None)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clips updates to a global norm, on full parameters or on shards.

    Equals ``optax.clip_by_global_norm`` on full updates. Unlike that, it may be part of an optimizer that ``Trainer``
    or ``shard_optimizer`` shards.

    Args:
        max_norm: The greatest norm that is not scaled down.

    Returns:
        The transformation; it has no state.

    Raises:
        ValueError: If ``max_norm`` is not positive.

    Example:
        >>> clip = clip_by_global_norm(1.0)
        >>> updates, _ = clip.update({"w": jnp.array([3.0, 4.0])}, clip.init(None))
        >>> [round(float(update), 6) for update in updates["w"]]
        [0.6, 0.8]
    """
    # One of optax.inject_hyperparams is a scalar array, whose value may not be known yet.
    if not isinstance(max_norm, jax.Array) and not (is_number(max_norm) and max_norm > 0):
        raise ValueError(f"max_norm (={max_norm!r}) must be positive")

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        norm = global_norm(updates)
        passes = norm < max_norm

        def clip(leaf: jax.Array) -> jax.Array:
            return jnp.where(passes, leaf, leaf / norm.astype(leaf.dtype) * max_norm)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm of all elements of a tree, over all ranks if its leaves are shards.

    Args:
        tree: Arrays under the names of parameters of their shapes; some may be missing.

    Returns:
        A scalar, summed at least in float32.

    Raises:
        ValueError: If the optimizer is to be sharded, and a leaf has not the name of a parameter of its shape.
    """
    over, shapes = _shards.get(), _full.get()
    leaves = named_leaves(tree)
    for name, leaf in leaves.items():
        if shapes is not None and shapes.get(name) != leaf.shape:  # its shard would be taken for another
            found = f"{name!r} is " + (f"{leaf.shape} for {shapes[name]}" if name in shapes else "none")
            raise ValueError(f"updates in shards must keep the names of parameters, and {found}: clip the whole tree")

    def jaxddp_global_norm(leaves: dict[str, jax.Array]) -> jax.Array:
        if over is None:
            return jnp.sqrt(sum_of_squares(leaves.values()))
        axis, cuts = over
        shards, replicated = [], []
        for name, leaf in leaves.items():
            cut = cuts[name]
            if cut is None:
                replicated.append(leaf)
            elif leaf.size:  # an optimizer may have changed the zeros of the padding
                shard = leaf if cut.dim is not None else leaf.reshape(-1, cut.chunk)
                shards.append(cut.without_padding(shard, lax.axis_index(axis)))
        with jax.named_scope(METRICS_SCOPE):
            total = all_reduce(sum_of_squares(shards), axis)
        return jnp.sqrt(total + sum_of_squares(replicated))

    assert jaxddp_global_norm.__name__ == GLOBAL_NORM
    return jax.jit(jaxddp_global_norm)(leaves)


@contextlib.contextmanager
def on_shards(axis: str, cuts: Mapping[str, Cut | None]) -> Iterator[None]:
    """Makes ``global_norm`` sum over ranks inside the block.

    Args:
        axis: Name of the mesh axis over which updates are sharded.
        cuts: How each parameter is cut, by name; None if its update is replicated.
    """
    token = _shards.set((axis, cuts))
    try:
        yield
    finally:
        _shards.reset(token)


@contextlib.contextmanager
def on_full(params: Any) -> Iterator[None]:
    """Makes ``global_norm`` refuse, inside the block, what it could not find again among shards of these parameters."""
    token = _full.set({name: leaf.shape for name, leaf in named_leaves(params).items()})
    try:
        yield
    finally:
        _full.reset(token)
