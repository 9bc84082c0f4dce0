"""Trees of numbers in one dtype, and how far they are apart."""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..tree import is_key, named_leaves

COPIES = "copies of "


def wide_enough(dtype: Any) -> AbstractContextManager[Any]:
    """Lets JAX compute in float64 where that is the dtype."""
    return jax.enable_x64(jax.config.read("jax_enable_x64") or dtype == jnp.float64)


def cast(tree: Any, dtype: Any) -> Any:
    """A tree with its floating leaves in a dtype, complex ones alike; the leaves as they are if it is None."""

    def leaf_in_dtype(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and is_key(leaf):
            return leaf
        array = np.asarray(leaf)
        if dtype is None or not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        return array.astype(jnp.promote_types(dtype, jnp.complex64) if np.iscomplexobj(array) else dtype)

    return jax.tree.map(leaf_in_dtype, tree)


def on_host(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by name, without keys; and a name, ``copies of NAME``, for each leaf of which devices hold other bits."""
    found: dict[str, np.ndarray] = {}
    for name, leaf in named_leaves(tree).items():
        if not is_key(leaf):
            found[name] = np.asarray(leaf)
        copies: dict[str, set[bytes]] = {}
        for shard in (jax.random.key_data(leaf) if is_key(leaf) else leaf).addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        if any(len(bits) > 1 for bits in copies.values()):
            found[COPIES + name] = np.array(0)
    return found


def difference(found: np.ndarray, right: np.ndarray, least: float = 1.0) -> float:
    """The largest of any element, relative to the largest element where that is above ``least``."""
    if found.shape != right.shape:
        return np.inf
    wide = np.complex128 if np.iscomplexobj(right) else np.float64
    is_same = found == right  # also two infinities
    one, other = (np.where(is_same, 0, array.astype(wide)) for array in (found, right))
    apart = np.max(np.abs(one - other), initial=0.0)
    size = np.max(np.abs(right), initial=0.0, where=np.isfinite(right))
    return float(apart / (max(least, float(size)) or 1.0))
