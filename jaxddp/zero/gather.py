"""Gathers parameters from their shards, and scatters their gradients back: one collective each way.

    forward    shards of a unit, packed [width]  -> all-gather      -> [N, width] -> full parameters
    backward   full gradients -> [N, width]      -> reduce-scatter  -> [width]    -> gradients of the shards

There are three dtypes: the shards' (the masters, which the optimizer updates), the all-gather's and the
reduce-scatter's. Gradients are returned in the shards' dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..communication.axes import scatter_sum, shard_axis
from ..communication.collectives import Axis, all_gather
from ..communication.sharding import Cut
from ..scopes import SYNC_SCOPE
from ..strategy import Precision


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a parameter, possibly sliced along its leading dimension.

    Attributes:
        local: ``[rows, c]``, or ``[c]`` if the parameter is not cut by row.
        cut: How the full parameter is cut.
        dtype: Dtype of the full parameter.
        is_trained: Whether it has a gradient.
    """

    local: jax.Array
    cut: Cut
    dtype: Any
    is_trained: bool = True

    def rows(self, local: jax.Array, shape: tuple[int, ...]) -> Shard:
        """The shard of some rows, of a given full shape; of a single row if ``local`` has one dimension."""
        return replace(self, local=local, cut=Cut(shape, self.cut.num_ranks, by_row=local.ndim == 2))


@dataclass(frozen=True)
class Gather:
    """Gathers the parameters of a unit.

    Attributes:
        axis: Name of the mesh axis, or of several.
        precision: Dtypes of the all-gather and the reduce-scatter.
        sends: False for a step without communication: copies of this rank's shards replace those of the others.
        as_bits: As for ``all_gather``.
    """

    axis: Axis
    precision: Precision
    sends: bool = True
    as_bits: bool = False

    def __call__(self, shards: Sequence[Shard]) -> list[jax.Array]:
        """Gathers full parameters with one all-gather per dtype; its transpose is one reduce-scatter per dtype.

        Args:
            shards: This rank's.

        Returns:
            The full parameters. The gradient of each shard is summed over ranks.
        """
        places: dict[Any, list[int]] = {}  # by dtype
        for place, shard in enumerate(shards):
            places.setdefault(shard.local.dtype, []).append(place)
        full: list[Any] = [None] * len(shards)
        for dtype, some in places.items():
            for place, array in zip(some, self._gather([shards[place] for place in some], dtype), strict=True):
                full[place] = array
        return full

    def _gather(self, shards: list[Shard], master: Any) -> list[jax.Array]:
        if not jnp.issubdtype(master, jnp.floating):
            return self._all_gather(shards, [shard.local for shard in shards], master)

        def forward(local: list[jax.Array]) -> list[jax.Array]:
            dtype = self.precision.gather_dtype or self.precision.compute_dtype or master
            return self._all_gather(shards, local, dtype)

        gather = jax.custom_vjp(forward)
        gather.defvjp(lambda local: (forward(local), None), lambda _, grads: (self._reduce_scatter(shards, grads),))
        return gather([shard.local for shard in shards])

    def _all_gather(self, shards: list[Shard], local: list[jax.Array], dtype: Any) -> list[jax.Array]:
        with jax.named_scope(SYNC_SCOPE):
            row = jnp.concatenate([array.reshape(1, -1) for array in local], axis=1).astype(dtype)
            tiles = (shards[0].cut.num_ranks, 1)
            buffer = (
                all_gather(row, shard_axis(self.axis), as_bits=self.as_bits) if self.sends else jnp.tile(row, tiles)
            )
            parts = jnp.split(buffer, _ends(shards), axis=1)
            return [shard.cut.from_chunks(part).astype(shard.dtype) for shard, part in zip(shards, parts, strict=True)]

    def _reduce_scatter(self, shards: list[Shard], grads: list[jax.Array]) -> list[jax.Array]:
        sums = [jnp.zeros_like(shard.local) for shard in shards]
        trained = [place for place, shard in enumerate(shards) if shard.is_trained]
        if not trained:
            return sums
        dtype = self.precision.reduce_dtype or shards[0].local.dtype
        with jax.named_scope(SYNC_SCOPE):
            chunks = [shards[place].cut.to_chunks(grads[place].astype(dtype)) for place in trained]
            buffer = jnp.concatenate(chunks, axis=1)
            if self.sends:
                total = scatter_sum(buffer, self.axis)
            else:
                total = lax.dynamic_slice_in_dim(buffer, lax.axis_index(shard_axis(self.axis)), 1)
            parts = jnp.split(total[0], _ends([shards[place] for place in trained]))
            for place, part in zip(trained, parts, strict=True):
                sums[place] = part.reshape(sums[place].shape).astype(sums[place].dtype)
        return sums


def _ends(shards: list[Shard]) -> list[int]:
    return list(itertools.accumulate(shard.local.size for shard in shards))[:-1]
