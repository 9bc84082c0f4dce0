"""Shards of parameters, and how the loss gathers them: one collective each way.

    forward    shards of a unit, packed [width]  -> all-gather      -> [N, width] -> full parameters
    backward   full gradients -> [N, width]      -> reduce-scatter  -> [width]    -> gradients of the shards

A shard holds the master. It is cast to the compute dtype before the gather; its gradient is summed in ``grad_dtype``
and returned in the master's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..communication.collectives import all_gather, is_silent, silent, traced_platform
from ..communication.sharding import Cut, scatter_sum
from ..layout import Leaf
from ..scopes import SYNC_SCOPE
from ..strategy import Ranks


class Shard(NamedTuple):
    """This rank's part of a parameter, or of rows of a stack.

    Attributes:
        local: The part.
        leaf: Where the whole lies.
        dtype: Of the full parameter, as the loss takes it.
        grad_dtype: In which its gradient is summed over ranks; None if it has none.
    """

    local: jax.Array
    leaf: Leaf
    dtype: Any
    grad_dtype: Any

    @property
    def cut(self) -> Cut:
        """How it, or each of its blocks, is cut."""
        assert self.leaf.cut is not None
        return self.leaf.cut

    def rows(self, local: jax.Array, shape: tuple[int, ...]) -> Shard:
        """This rank's part of some rows of a stack, or of one, which lacks the leading dimension.

        Args:
            local: The part.
            shape: Of the full rows.
        """
        dropped, whole = len(self.leaf.shape) - len(shape), self.cut
        assert whole.dim is not None
        cut = Cut((*shape[: 1 - dropped], *whole.shape[1:]), whole.num_ranks, whole.dim - dropped)
        spec, counts = PartitionSpec(*self.leaf.spec[dropped:]), self.leaf.counts[dropped:]
        return self._replace(local=local, leaf=replace(self.leaf, shape=shape, cut=cut, spec=spec, counts=counts))


def stacked_dims(leaf: Leaf) -> int:
    """In how many leading dimensions a parameter is a stack, of which a rank has its part of every row."""
    if leaf.cut is None or leaf.cut.dim is None:
        return 0
    return next((dim for dim, axes in enumerate(leaf.spec[: leaf.cut.dim]) if axes), leaf.cut.dim)


def gather(shards: Sequence[Shard], ranks: Ranks, others: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
    """Gathers full parameters with one all-gather per dtype; the transpose is one reduce-scatter per dtype.

    In the backward, no gradient is used before all are computed. Otherwise XLA computes the gradients of activations
    first, for all units, and keeps alive what those of parameters still need. What has no gradient, such as a batch,
    stays out of that barrier: it would make JAX compute one, and gather parameters for it.

    Args:
        shards: This rank's.
        ranks: The ranks.
        others: What else a unit takes.

    Returns:
        The full parameters, and the others. The gradient of each shard is summed over ranks.
    """
    sends_nothing = is_silent()  # the backward is traced later, outside of the block
    groups: dict[Any, list[int]] = {}
    for place, shard in enumerate(shards):
        groups.setdefault((shard.dtype, shard.local.dtype), []).append(place)

    def by_group(function: Callable[..., list[jax.Array]], arrays: Sequence[Any]) -> list[Any]:
        """Calls ``function(shards, arrays)`` on those of one dtype at a time, without what is None."""
        found: list[Any] = [None] * len(arrays)
        for group in groups.values():
            if places := [place for place in group if arrays[place] is not None]:
                with silent() if sends_nothing else contextlib.nullcontext():
                    some = function([shards[place] for place in places], [arrays[place] for place in places], ranks)
                found = put(found, places, some)
        return found

    def forward(local: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]]:
        return by_group(_all_gather, local), others

    def forward_of(local: list[Any], others: list[Any]) -> tuple[Any, list[tuple[()] | None]]:
        # What wants a gradient, as () or None: JAX treats both as structure, where a bool would be an array.
        is_wanted = [one.perturbed and shard.grad_dtype is not None for one, shard in zip(local, shards, strict=True)]
        wanted = [() if one else None for one in (*is_wanted, *(other.perturbed for other in others))]
        return forward([one.value for one in local], [one.value for one in others]), wanted

    def backward(wanted: list[tuple[()] | None], grads: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        found = [
            None if wants is None or isinstance(grad, jax.custom_derivatives.SymbolicZero) else grad
            for wants, grad in zip(wanted, itertools.chain(*grads), strict=True)
        ]
        if others:  # without any, the gradients are all that there is to compute
            found = lax.optimization_barrier(found)
        return by_group(_reduce_scatter, found[: len(shards)]), found[len(shards) :]

    gathered = jax.custom_vjp(forward)
    gathered.defvjp(forward_of, backward, symbolic_zeros=True)
    return gathered([shard.local for shard in shards], list(others))


def _all_gather(shards: list[Shard], local: list[jax.Array], ranks: Ranks) -> list[jax.Array]:
    @jax.named_scope(SYNC_SCOPE)
    def on_device(local: list[jax.Array]) -> list[jax.Array]:
        row = jnp.concatenate([array.reshape(1, -1) for array in local], axis=1).astype(shards[0].dtype)
        rows = all_gather(row, ranks.shard_axis, as_bits=traced_platform() == "cpu")
        return [shard.cut.from_rows(part) for shard, part in zip(shards, _split(rows, shards), strict=True)]

    specs = [shard.leaf.shard_spec for shard in shards], [shard.leaf.spec for shard in shards]
    return ranks.on_devices(on_device, (specs[0],), specs[1])(local)


def _reduce_scatter(shards: list[Shard], grads: list[jax.Array], ranks: Ranks) -> list[jax.Array]:
    @jax.named_scope(SYNC_SCOPE)
    def on_device(grads: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(shards, grads, strict=True)
        rows = jnp.concatenate([one.cut.to_rows(grad.astype(one.grad_dtype)) for one, grad in pairs], axis=1)
        parts = _split(scatter_sum(rows, ranks.shard_axis, ranks.replica_axes), shards)
        return [
            part.reshape(one.cut.shard_shape).astype(one.leaf.dtype) for part, one in zip(parts, shards, strict=True)
        ]

    specs = [shard.leaf.spec for shard in shards], [shard.leaf.shard_spec for shard in shards]
    return ranks.on_devices(on_device, (specs[0],), specs[1])(grads)


def _split(rows: jax.Array, shards: list[Shard]) -> list[jax.Array]:
    """The columns of each shard."""
    return jnp.split(rows, list(itertools.accumulate(shard.cut.chunk for shard in shards))[:-1], axis=1)


def put(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values, with others in some places."""
    values = list(values)
    for place, other in zip(places, others, strict=True):
        values[place] = other
    return values
