"""Gathers parameters from their shards, and scatters their gradients back: one collective each way.

    forward    shards of a unit, packed [width]  -> all-gather      -> [N, width] -> full parameters
    backward   full gradients -> [N, width]      -> reduce-scatter  -> [width]    -> gradients of the shards

There are three dtypes: the shards' (the masters, which the optimizer updates), the all-gather's and the
reduce-scatter's. Gradients are returned in the shards' dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..communication.axes import scatter_sum, shard_axis
from ..communication.collectives import Axis, all_gather
from ..communication.sharding import Blocks, Cut
from ..scopes import SYNC_SCOPE
from ..strategy import Precision


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a parameter, possibly sliced along its leading dimension.

    Attributes:
        local: ``[rows, c]``, or ``[c]`` if the parameter is not cut by row.
        cut: How the full parameter, or each of its blocks, is cut.
        dtype: Dtype of the full parameter.
        is_trained: Whether it has a gradient.
        blocks: How other axes of the mesh split the full parameter; None if they do not. ``local`` holds the shards of
            all blocks, ``[..., T c]``.
    """

    local: jax.Array
    cut: Cut
    dtype: Any
    is_trained: bool = True
    blocks: Blocks | None = None

    def rows(self, local: jax.Array, shape: tuple[int, ...]) -> Shard:
        """The shard of some rows, of a given full shape; of a single row if ``local`` has one dimension."""
        blocks = self.blocks and self.blocks.of_last(len(shape))
        block = blocks.shape_of(shape) if blocks else shape
        return replace(self, local=local, cut=Cut(block, self.cut.num_ranks, by_row=local.ndim == 2), blocks=blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""
        counts = self.blocks.counts if self.blocks else (1,) * len(self.cut.shape)
        return tuple(count * size for count, size in zip(counts, self.cut.shape, strict=True))

    @property
    def local_spec(self) -> PartitionSpec:
        """How ``local`` lies along the other axes."""
        return PartitionSpec(*(None,) * (self.local.ndim - 1), self.blocks.axes) if self.blocks else PartitionSpec()

    @property
    def full_spec(self) -> PartitionSpec:
        """How the full parameter lies along the other axes."""
        return self.blocks.spec if self.blocks else PartitionSpec()


@dataclass(frozen=True)
class Gather:
    """Gathers the parameters of a unit.

    Attributes:
        axis: Name of the mesh axis, or of several.
        precision: Dtypes of the all-gather and the reduce-scatter.
        sends: False for a step without communication: copies of this rank's shards replace those of the others.
        as_bits: As for ``all_gather``.
        other_axes: Of the mesh, along which parameters may be split.
    """

    axis: Axis
    precision: Precision
    sends: bool = True
    as_bits: bool = False
    other_axes: tuple[str, ...] = ()

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
        @jax.named_scope(SYNC_SCOPE)
        def on_device(local: list[jax.Array]) -> list[jax.Array]:
            row = jnp.concatenate([array.reshape(1, -1) for array in local], axis=1).astype(dtype)
            if self.sends:
                buffer = all_gather(row, shard_axis(self.axis), as_bits=self.as_bits)
            else:
                buffer = jnp.tile(row, (shards[0].cut.num_ranks, 1))
            parts = jnp.split(buffer, _ends(local), axis=1)
            return [shard.cut.from_chunks(part).astype(shard.dtype) for shard, part in zip(shards, parts, strict=True)]

        specs = [shard.local_spec for shard in shards], [shard.full_spec for shard in shards]
        return self._on_devices(on_device, *specs)(local)

    def _reduce_scatter(self, shards: list[Shard], grads: list[jax.Array]) -> list[jax.Array]:
        sums = [jnp.zeros_like(shard.local) for shard in shards]
        trained = [place for place, shard in enumerate(shards) if shard.is_trained]
        if not trained:
            return sums
        some = [shards[place] for place in trained]
        dtype = self.precision.reduce_dtype or shards[0].local.dtype

        @jax.named_scope(SYNC_SCOPE)
        def on_device(grads: list[jax.Array], local: list[jax.Array]) -> list[jax.Array]:
            chunks = [shard.cut.to_chunks(grad.astype(dtype)) for shard, grad in zip(some, grads, strict=True)]
            buffer = jnp.concatenate(chunks, axis=1)
            if self.sends:
                total = scatter_sum(buffer, self.axis)
            else:
                total = lax.dynamic_slice_in_dim(buffer, lax.axis_index(shard_axis(self.axis)), 1)
            parts = jnp.split(total[0], _ends(local))
            return [part.reshape(one.shape).astype(one.dtype) for part, one in zip(parts, local, strict=True)]

        like = [shard.local_spec for shard in some]
        found = self._on_devices(on_device, ([shard.full_spec for shard in some], like), like)(
            [grads[place] for place in trained], [sums[place] for place in trained]
        )
        for place, one in zip(trained, found, strict=True):
            sums[place] = one
        return sums

    def _on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Maps a function over the devices of a rank, each of which has blocks of its own."""
        if not self.other_axes:
            return function
        in_specs = in_specs if isinstance(in_specs, tuple) else (in_specs,)
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names={*self.other_axes}, check_vma=False
        )


def _ends(local: list[jax.Array]) -> list[int]:
    return list(itertools.accumulate(one.size for one in local))[:-1]
