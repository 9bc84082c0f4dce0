"""What the stages share: which shard of a parameter is whose, and the optimizer that runs on shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..clipping import on_shards
from ..communication.sharding import cut
from ..layout import Leaf
from ..strategy import Optimizer, Ranks, of_optax
from ..tree import named_leaves
from .elementwise import check_elementwise, shard_leaves


def cut_leaves(params: Any, ranks: Ranks) -> Any:
    """Cuts every parameter over the shard axis: along its first dimension that other axes do not split."""
    return jax.tree.map(lambda leaf: cut_leaf(leaf, ranks, range(len(leaf.shape))), params)


def cut_leaf(leaf: Leaf, ranks: Ranks, dims: Iterable[int]) -> Leaf:
    """Cuts a parameter along the first of some dimensions that the ranks divide and other axes do not split."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # PRNG keys have no elements to deal out
        return leaf
    split = {dim for dim, axes in enumerate(leaf.spec) if axes}
    return replace(leaf, cut=cut(leaf.block, ranks.num_shards, [dim for dim in dims if dim not in split]))


def shard_state(optimizer: Any, updated: Any, ranks: Ranks) -> tuple[Any, Optimizer]:
    """Lays out the state of an optimizer of shards, and makes it run there.

    Args:
        optimizer: An optax transformation.
        updated: The trained parameters, a tree of ``Leaf``, some of them cut.
        ranks: The ranks.

    Returns:
        A tree of ``Leaf`` like the state, and the optimizer.

    Raises:
        ValueError: If it is not element-wise.
    """
    state = shard_leaves(optimizer, updated)
    check_elementwise(optimizer, updated, state)
    inner = of_optax(optimizer)
    cuts = {name: leaf.cut for name, leaf in named_leaves(updated).items()}

    def init(params: Any) -> Any:
        with on_shards(ranks.shard_axis, cuts):
            return inner.init(params)

    def step(*args: Any) -> tuple[Any, Any]:
        with on_shards(ranks.shard_axis, cuts):
            return inner.step(*args)

    return state, Optimizer(init, step)
