"""Whether ranks still hold the same: what every rank has in full must be equal bit for bit.

Every rank computes its replicas by the same program from the same sums. A flipped bit or a faulty device changes one of
them and training goes on, since gradients are averaged, while the replicas drift apart. Checked is what
``state_layout.py`` lists as full; a shard has no replica.

    checksum_r = sum over words i of (2 i + 1) * mix(word_i)   mod 2^32        of each leaf on rank r

``mix`` is a bijection that spreads each bit over the word, and the factor is odd: whatever changes a single word
changes the sum, and flips of the same bit in many words do not cancel. The program has one collective, an all-gather
of ``[num_leaves]`` words; the step's program stays as it is planned.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..communication.collectives import all_gather, all_reduce
from ..tree import named_leaves
from .packing import leaf_specs, shard_map
from .step import TrainState


class ReplicaError(RuntimeError):
    """Ranks hold different values of what should be the same.

    Attributes:
        state: The state after the step, where ``Trainer.step`` found it; else None.
        leaf: Name of the first such leaf, such as ``"params.w"``.
        ranks: Those that do not hold what most ranks hold.
        num_leaves: How many leaves differ.
        difference: Largest absolute difference of an element of the first.
    """

    def __init__(
        self, message: str, leaf: str = "", ranks: tuple[int, ...] = (), num_leaves: int = 0, difference: float = 0.0
    ) -> None:
        """Keeps what was found."""
        super().__init__(message)
        self.leaf, self.ranks, self.num_leaves, self.difference = leaf, ranks, num_leaves, difference
        self.state: TrainState | None = None


def _error(leaf: str, ranks: tuple[int, ...], num_leaves: int, difference: float, step: int) -> ReplicaError:
    of_ranks = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
    more = f", as do {num_leaves - 1} more leaves" * (num_leaves > 1)
    message = (
        f"{leaf} of {of_ranks} differs by up to {difference:.3g} from what most ranks hold after step {step}{more}:"
        " a device or its memory may be faulty"
    )
    return ReplicaError(message, leaf, ranks, num_leaves, difference)


def check_replicas(state: TrainState, specs: Any, mesh: Mesh | AbstractMesh) -> None:
    """Compares what all ranks hold in full.

    Args:
        state: A training state over the mesh.
        specs: Its ``PartitionSpec`` by leaf, or a prefix of them.
        mesh: One-dimensional.

    Raises:
        ReplicaError: If ranks differ.
    """
    leaves = _replicated(state, specs)
    sums = np.asarray(_all_checksums(list(leaves.values()), mesh))
    differing = [place for place, of_ranks in enumerate(sums.T) if len(set(of_ranks)) > 1]
    if not differing:
        return
    of_ranks = sums[:, differing[0]].tolist()
    ((most, _),) = Counter(of_ranks).most_common(1)
    name, leaf = list(leaves.items())[differing[0]]
    differences = _differences(leaf, of_ranks.index(most), mesh)
    ranks = [rank for rank, found in enumerate(of_ranks) if found != most]
    raise _error(name, tuple(ranks), len(differing), float(np.max(differences)), int(state.step))


def _replicated(state: TrainState, specs: Any) -> dict[str, jax.Array]:
    named = zip(named_leaves(state).items(), leaf_specs(specs, state), strict=True)
    return {name: leaf for (name, leaf), spec in named if not any(spec) and leaf.size}


@partial(jax.jit, static_argnames="mesh")
def _all_checksums(leaves: list[jax.Array], mesh: Mesh | AbstractMesh) -> jax.Array:
    """Gives ``[num_ranks, num_leaves]``, uint32."""
    (axis,) = mesh.axis_names

    def on_rank(leaves: list[jax.Array]) -> jax.Array:
        return all_gather(jnp.stack([_checksum(leaf) for leaf in leaves])[None], axis)

    return shard_map(on_rank, mesh=mesh, in_specs=(PartitionSpec(),), out_specs=PartitionSpec())(leaves)


@partial(jax.jit, static_argnames="mesh")
def _differences(leaf: jax.Array, rank: int, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Gives ``[num_ranks]``, the largest distance of an element from that of the given rank."""
    (axis,) = mesh.axis_names

    def on_rank(leaf: jax.Array, rank: jax.Array) -> jax.Array:
        numbers = _numbers(leaf)
        numbers = numbers if jnp.issubdtype(numbers.dtype, jnp.floating) else numbers.astype(jnp.float32)
        theirs = all_reduce(jnp.where(lax.axis_index(axis) == rank, numbers, jnp.zeros_like(numbers)), axis)
        return all_gather(jnp.max(jnp.abs(numbers - theirs))[None], axis)

    whole = PartitionSpec()
    return shard_map(on_rank, mesh=mesh, in_specs=(whole, whole), out_specs=whole)(leaf, jnp.asarray(rank))


def _checksum(leaf: jax.Array) -> jax.Array:
    words = _words(leaf)
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)  # as in MurmurHash3
    words = words ^ (words >> 13)
    return jnp.sum(words * (2 * lax.iota(jnp.uint32, words.size) + 1), dtype=jnp.uint32)


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of an array as 32-bit words, ``[num_words]``."""
    leaf = _numbers(leaf)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)  # 8 bytes become two words
    return lax.bitcast_convert_type(leaf, unsigned).reshape(-1).astype(jnp.uint32)


def _numbers(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([leaf.real, leaf.imag])
    return leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
