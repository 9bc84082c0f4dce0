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

from ..communication.collectives import all_reduce
from ..communication.reduction import sum_of_squares
from ..communication.sharding import Cut
from ..scopes import METRICS_SCOPE
from ..tree import named_leaves, path_name
from .elementwise import GLOBAL_NORM

_shards: ContextVar[tuple[str, Mapping[str, Cut | None], Any] | None] = ContextVar("jaxddp_shards", default=None)


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
    if not max_norm > 0:
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
        tree: Arrays under the names of the parameters; some may be missing.

    Returns:
        A scalar, summed at least in float32.

    Raises:
        ValueError: If the leaves are shards and one does not have the name of a parameter, or may have another's, in a
            list of fewer entries.
    """
    over = _shards.get()
    rule = "updates in shards must keep the names of parameters"
    if over is not None:
        lengths = _lengths(over[2])
        for name, length in _lengths(tree).items():
            if lengths.get(name) != length:
                raise ValueError(f"{rule}, and a list of {lengths.get(name)} has {length} entries: clip the whole tree")

    def jaxddp_global_norm(leaves: dict[str, jax.Array]) -> jax.Array:
        if over is None:
            return jnp.sqrt(sum_of_squares(leaves.values()))
        axis, cuts, _ = over
        shards, replicated = [], []
        for name, leaf in leaves.items():
            if name not in cuts:
                raise ValueError(f"{rule}, and {name!r} is none: clip the whole tree")
            cut = cuts[name]
            if cut is None:
                replicated.append(leaf)
            else:  # an optimizer may have changed the zeros of the padding
                shards.append(cut.without_padding(leaf.reshape(cut.shard_shape), lax.axis_index(axis)))
        with jax.named_scope(METRICS_SCOPE):
            total = all_reduce(sum_of_squares(shards), axis)
        return jnp.sqrt(total + sum_of_squares(replicated))

    assert jaxddp_global_norm.__name__ == GLOBAL_NORM
    return jax.jit(jaxddp_global_norm)(named_leaves(tree))


@contextlib.contextmanager
def on_shards(axis: str, cuts: Mapping[str, Cut | None], params: Any) -> Iterator[None]:
    """Makes ``global_norm`` sum over ranks inside the block.

    Args:
        axis: Name of the mesh axis over which updates are sharded.
        cuts: How each parameter is cut, by name; None if its update is replicated.
        params: A tree of the parameters' structure.
    """
    token = _shards.set((axis, cuts, params))
    try:
        yield
    finally:
        _shards.reset(token)


def _lengths(tree: Any, path: tuple[Any, ...] = ()) -> dict[str, int]:
    """Lengths of the lists and tuples in a tree, by name; an entry that holds no leaf counts."""
    children = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is not tree)
    if not children or not children[0][0]:  # without entries, or a leaf
        return {}
    found = {path_name(path): len(children)} if isinstance(children[0][0][0], jax.tree_util.SequenceKey) else {}
    for key, child in children:
        found |= _lengths(child, path + key)
    return found
