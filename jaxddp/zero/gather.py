"""Shards of parameters inside a loss function, and how they are gathered: one collective each way.

    forward    shards of a unit, packed [width]  -> all-gather      -> [N, width] -> full parameters
    backward   full gradients -> [N, width]      -> reduce-scatter  -> [width]    -> gradients of the shards

A shard holds the master. It is cast to the compute dtype before the gather; its gradient is summed in ``grad_dtype``
and returned in the master's.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..communication.axes import scatter_sum
from ..communication.collectives import all_gather, is_silent, silent
from ..communication.gloo import traced_platform
from ..communication.sharding import Cut
from ..layout import Leaf
from ..scopes import SYNC_SCOPE
from ..strategy import Ranks

_TREE_FUNCTIONS = ("jax.tree", "jax.tree_util", "jax._src.tree", "jax._src.tree_util")


@dataclass(frozen=True)
class Held:
    """How a parameter is held: what is known of it when the step is traced.

    Attributes:
        leaf: Where the parameter lies.
        dtype: Of the full parameter, as the loss function takes it.
        grad_dtype: In which its gradient is summed over ranks.
        is_trained: Whether it has a gradient.
    """

    leaf: Leaf
    dtype: Any
    grad_dtype: Any
    is_trained: bool


@jax.tree_util.register_pytree_node_class
class Shard:
    """Stands for a full parameter in a loss function, or for rows of it: those of a stack, by index or in a scan.

    Only ``layer`` reads it. It is a tree of one array, so that ``lax.scan``, ``jax.checkpoint`` and tree functions
    take it.
    """

    def __init__(self, local: Any, held: Held) -> None:
        """Keeps this rank's shard, possibly some rows of it, and how the whole is held."""
        self.local, self.held = local, held

    def tree_flatten(self) -> tuple[tuple[Any], Held]:
        """Gives JAX's transformations the array, and tree functions of a loss a leaf that has the full shape."""
        return (_Leaf(self.local, self.held) if _is_called_by_a_loss() else self.local,), self.held

    @classmethod
    def tree_unflatten(cls, held: Held, children: tuple[Any]) -> Shard:
        """Undoes ``tree_flatten``."""
        return cls(children[0].local if isinstance(children[0], _Leaf) else children[0], held)

    def __getitem__(self, index: Any) -> Shard:
        """Rows of a stack."""
        return type(self)(self.local[index], self.held)

    @property
    def cut(self) -> Cut:
        """How a block of what is here is cut; rows leave dimensions out in front."""
        whole = self.held.leaf.cut
        assert whole is not None
        if whole.dim is None:
            return whole
        dim = self.local.ndim - (len(whole.shape) - whole.dim)
        shape = list(self.shape)
        for place, count in enumerate(self._of_last(self.held.leaf.counts)):
            shape[place] //= count
        return Cut(tuple(shape), whole.num_ranks, dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""
        whole = self.held.leaf.cut
        assert whole is not None
        if whole.dim is None:
            return self.held.leaf.shape
        shape = list(self.local.shape)
        shape[self.local.ndim - (len(whole.shape) - whole.dim)] *= whole.num_ranks
        return tuple(shape)

    @property
    def size(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the full parameter."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the full parameter."""
        return self.held.dtype

    @property
    def full_spec(self) -> PartitionSpec:
        """How the full parameter lies along the other axes."""
        spec = (*self.held.leaf.spec, *(None,) * len(self.held.leaf.shape))[: len(self.held.leaf.shape)]
        return PartitionSpec(*self._of_last(spec))

    @property
    def local_spec(self) -> PartitionSpec:
        """How the shard lies along the other axes."""
        return self.held.leaf.shard_spec if self.held.leaf.is_padded else self.full_spec

    def _of_last(self, each: Sequence[Any]) -> Sequence[Any]:
        return each if self.held.leaf.is_padded else each[len(each) - self.local.ndim :] if each else each


class _Leaf(Shard):
    """A shard as a leaf of its own: no tree, so that tree functions show its full shape and not the array's."""


def _is_called_by_a_loss() -> bool:
    """Whether a tree function is called by anything but JAX, or by Flax, which hands leaves on to JAX."""
    frame: Any = sys._getframe(2)
    while (module := frame.f_globals.get("__name__", "")) in _TREE_FUNCTIONS:
        frame = frame.f_back
    return module.partition(".")[0] not in ("jax", "flax")


def gather(shards: Sequence[Shard], ranks: Ranks) -> list[jax.Array]:
    """Gathers full parameters with one all-gather per dtype; the transpose is one reduce-scatter per dtype.

    Args:
        shards: This rank's.
        ranks: The ranks.

    Returns:
        The full parameters. The gradient of each shard is summed over ranks.
    """
    places: dict[Any, list[int]] = {}
    for place, shard in enumerate(shards):
        places.setdefault((shard.dtype, shard.local.dtype), []).append(place)
    full: list[Any] = [None] * len(shards)
    for some in places.values():
        for place, array in zip(some, _gather([shards[place] for place in some], ranks), strict=True):
            full[place] = array
    return full


def _gather(shards: list[Shard], ranks: Ranks) -> list[jax.Array]:
    sends_nothing = is_silent()  # the backward is traced later, outside of the block

    def forward(local: list[jax.Array]) -> list[jax.Array]:
        return _all_gather(shards, local, ranks, sends_nothing)

    local = [shard.local for shard in shards]
    if not jnp.issubdtype(shards[0].dtype, jnp.floating):
        return forward(local)
    gathered = jax.custom_vjp(forward)
    gathered.defvjp(
        lambda local: (forward(local), None),
        lambda _, grads: (_reduce_scatter(shards, grads, ranks, sends_nothing),),
    )
    return gathered(local)


def _all_gather(shards: list[Shard], local: list[jax.Array], ranks: Ranks, sends_nothing: bool) -> list[jax.Array]:
    @_in_sync(sends_nothing)
    def on_device(local: list[jax.Array]) -> list[jax.Array]:
        row = jnp.concatenate([array.reshape(1, -1) for array in local], axis=1).astype(shards[0].dtype)
        rows = all_gather(row, ranks.shard_axis, as_bits=traced_platform() == "cpu")
        parts = jnp.split(rows, _ends(local), axis=1)
        return [shard.cut.from_rows(part) for shard, part in zip(shards, parts, strict=True)]

    specs = [shard.local_spec for shard in shards], [shard.full_spec for shard in shards]
    return ranks.on_devices(on_device, (specs[0],), specs[1])(local)


def _reduce_scatter(shards: list[Shard], grads: list[jax.Array], ranks: Ranks, sends_nothing: bool) -> list[jax.Array]:
    sums = [jnp.zeros_like(shard.local) for shard in shards]
    trained = [place for place, shard in enumerate(shards) if shard.held.is_trained]
    if not trained:
        return sums
    some = [shards[place] for place in trained]

    @_in_sync(sends_nothing)
    def on_device(grads: list[jax.Array], local: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(some, grads, strict=True)
        rows = jnp.concatenate([one.cut.to_rows(grad.astype(one.held.grad_dtype)) for one, grad in pairs], axis=1)
        parts = jnp.split(scatter_sum(rows, ranks.axis)[0], _ends(local))
        return [part.reshape(one.shape).astype(one.dtype) for part, one in zip(parts, local, strict=True)]

    specs = [one.full_spec for one in some], [one.local_spec for one in some]
    found = ranks.on_devices(on_device, specs, specs[1])(
        [grads[place] for place in trained], [sums[place] for place in trained]
    )
    for place, one in zip(trained, found, strict=True):
        sums[place] = one
    return sums


def _in_sync(sends_nothing: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if not sends_nothing:
                return function(*args)
            with silent():
                return function(*args)

        return jax.named_scope(SYNC_SCOPE)(run)

    return decorate


def _ends(local: list[jax.Array]) -> list[int]:
    return list(itertools.accumulate(one.size for one in local))[:-1]
