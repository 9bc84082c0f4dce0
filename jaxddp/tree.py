"""Trees of parameters: names for their leaves, and the split into what is trained and what is not.

A leaf's name is its path, joined by dots: ``params["layers"][0]["query"]["kernel"]`` is ``layers.0.query.kernel``.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .arguments import check_leaves
from .communication.buckets import TensorSpec


def named_leaves(tree: Any) -> dict[str, Any]:
    """Lists the leaves of a tree by dotted path, in its own order; raises a ValueError if two paths give one name."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if name in leaves:
            raise ValueError(f"two leaves have the name {name!r}: paths joined by dots must differ")
        leaves[name] = leaf
    return leaves


def path_name(path: tuple[Any, ...]) -> str:
    """Joins a key path with dots; the ``.value`` by which Flax ends the path of a variable is left out."""
    parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    if len(parts) > 1 and parts[-1] == "value" and isinstance(path[-1], jax.tree_util.GetAttrKey):
        parts.pop()
    return ".".join(parts)


def is_key(leaf: Any) -> bool:
    """Whether a leaf, an array or what describes one, holds typed RNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def like(tree: Any, leaves: dict[str, Any]) -> Any:
    """Makes a tree of the structure of another from named leaves; surplus ones are dropped."""
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[name] for name in named_leaves(tree)])


def tensor_specs(leaves: dict[str, Any]) -> dict[str, TensorSpec]:
    """Gives the names, shapes and dtypes of arrays, for a bucket plan."""
    return {name: TensorSpec(name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in leaves.items()}


def is_floating(dtype: Any) -> bool:
    """Whether something is a floating dtype, or the name of one."""
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except (TypeError, ValueError):
        return False


def check_params(params: Any, trainable: Callable[[str], bool] | None) -> None:
    """Refuses a tree without arrays, other leaves, and what is trainable and not floating, or state of a Flax model."""
    leaves = named_leaves(params)
    if not leaves:
        raise ValueError(f"params (={params!r}) must hold at least one array")
    trained = [name for name in leaves if trainable is None or trainable(name)]
    if not trained:
        raise ValueError(f"trainable must select at least one of the {len(leaves)} parameters, it selects none")
    nnx: Any = sys.modules.get("flax.nnx")  # a tree that holds its variables has loaded it
    kinds = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState) if nnx else ()
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: isinstance(node, kinds)):
        name = path_name(path)
        is_statistic = "batch_stats" in re.split(r"\W+", name)[:-1]  # of Linen's, also in a flattened dictionary
        if (is_statistic or isinstance(node, kinds)) and (trainable is None or trainable(name)):
            raise ValueError(
                f"parameter {name!r} is what Flax calls state, which must not be trained: give it as model_state=... to"
                " init of a Trainer(has_state=True); jaxddp.flax.from_nnx and from_linen take both apart"
            )
    check_leaves("params", leaves)
    for name in trained:
        if not jnp.issubdtype(leaves[name].dtype, jnp.floating):
            said = f"parameter {name!r} has dtype {leaves[name].dtype}: what is trained must be of a floating dtype"
            raise ValueError(f"{said}; leave it out with Trainer(trainable=...)")


def split(params: Any, trainable: Callable[[str], bool] | None) -> tuple[Any, Any]:
    """Splits a tree in two of the same structure, with None where a leaf belongs to the other."""
    is_chosen = jax.tree.map_with_path(lambda path, _: trainable is None or bool(trainable(path_name(path))), params)
    chosen = jax.tree.map(lambda leaf, is_chosen: leaf if is_chosen else None, params, is_chosen)
    return chosen, jax.tree.map(lambda leaf, is_chosen: None if is_chosen else leaf, params, is_chosen)


def merge(trainable: Any, frozen: Any) -> Any:
    """Undoes ``split``."""
    return jax.tree.map(
        lambda ours, theirs: theirs if ours is None else ours, trainable, frozen, is_leaf=lambda leaf: leaf is None
    )
