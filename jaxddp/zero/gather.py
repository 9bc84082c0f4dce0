"""Gathers parameters from their shards, and scatters their gradients back: one collective each way.

    forward    shards of a unit, packed [width]  -> all-gather      -> [N, width] -> whole parameters
    backward   whole gradients -> [N, width]     -> reduce-scatter  -> [width]    -> gradients of the shards

Three dtypes meet here, each explicit: that of the shard (the master's, in which the optimizer works), that in which
parameters travel, and that in which gradients are summed. Gradients come back in the master's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..communication.collectives import all_gather, reduce_scatter
from ..communication.sharding import Cut
from ..scopes import SYNC_SCOPE
from ..strategy import Precision


@dataclass(frozen=True)
class Shard:
    """A parameter of which this rank has a shard, or a row or some of it.

    Attributes:
        local: This rank's, ``[rows, c]``, or ``[c]`` of a parameter that is not cut by row.
        cut: How the whole is cut.
        dtype: Of the whole.
        is_trained: Whether it has a gradient.
    """

    local: jax.Array
    cut: Cut
    dtype: Any
    is_trained: bool = True

    def of(self, local: jax.Array) -> Shard:
        """The same of another array of its shape."""
        return replace(self, local=local)

    def rows(self, local: jax.Array, shape: tuple[int, ...]) -> Shard:
        """The shard of some of its rows, which have a given shape when whole; of one row if that has one dim."""
        return replace(self, local=local, cut=Cut(shape, self.cut.num_ranks, by_row=local.ndim == 2))


def make_gather(axis: str, precision: Precision, *, sends: bool = True) -> Callable[[Sequence[Shard]], list[jax.Array]]:
    """Makes the function that gathers the parameters of one unit.

    Args:
        axis: Name of the mesh axis.
        precision: In which dtypes parameters travel and gradients are summed.
        sends: Whether anything travels; if not, every rank's part is taken to be this one's.

    Returns:
        Shards ``->`` whole parameters, differentiable: the gradient of a shard is summed over ranks.
    """

    def gather(shards: Sequence[Shard]) -> list[jax.Array]:
        found: dict[int, jax.Array] = {}
        for dtype in dict.fromkeys(shard.local.dtype for shard in shards):
            places = [place for place, shard in enumerate(shards) if shard.local.dtype == dtype]
            found.update(zip(places, _gather_one_dtype([shards[place] for place in places]), strict=True))
        return [found[place] for place in range(len(shards))]

    def _gather_one_dtype(shards: list[Shard]) -> list[jax.Array]:
        master = shards[0].local.dtype
        if not jnp.issubdtype(master, jnp.floating):
            return _collect(shards, master)

        def collect(locals_: list[jax.Array]) -> list[jax.Array]:
            held = [shard.of(local) for shard, local in zip(shards, locals_, strict=True)]
            return _collect(held, precision.gather_dtype or precision.compute_dtype or master)

        whole = jax.custom_vjp(collect)
        whole.defvjp(lambda locals_: (collect(locals_), None), lambda _, grads: (_scatter(shards, grads),))
        return whole([shard.local for shard in shards])

    def _collect(shards: list[Shard], dtype: Any) -> list[jax.Array]:
        with jax.named_scope(SYNC_SCOPE):
            own = _join([shard.local.reshape(1, -1) for shard in shards]).astype(dtype)
            buffer = all_gather(own, axis) if sends else jnp.tile(own, (shards[0].cut.num_ranks, 1))
            parts = jnp.split(buffer, _ends(shards), axis=1)
            return [shard.cut.whole(part).astype(shard.dtype) for shard, part in zip(shards, parts, strict=True)]

    def _scatter(shards: list[Shard], grads: list[jax.Array]) -> list[jax.Array]:
        trained = [(shard, grad) for shard, grad in zip(shards, grads, strict=True) if shard.is_trained]
        if not trained:
            return [jnp.zeros_like(shard.local) for shard in shards]
        dtype = precision.reduce_dtype or shards[0].local.dtype
        with jax.named_scope(SYNC_SCOPE):
            buffer = _join([shard.cut.chunks(grad.astype(dtype)) for shard, grad in trained])
            total = reduce_scatter(buffer, axis) if sends else lax.dynamic_slice_in_dim(buffer, lax.axis_index(axis), 1)
            parts = iter(jnp.split(total[0], _ends([shard for shard, _ in trained])))
            return [
                next(parts).reshape(shard.local.shape).astype(shard.local.dtype)
                if shard.is_trained
                else jnp.zeros_like(shard.local)
                for shard in shards
            ]

    return gather


def _join(rows: list[jax.Array]) -> jax.Array:
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)


def _ends(shards: list[Shard]) -> list[int]:
    return list(itertools.accumulate(shard.local.size for shard in shards))[:-1]
