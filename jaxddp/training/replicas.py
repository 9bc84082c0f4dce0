"""Whether ranks still hold the same: what every rank has in full must be equal bit for bit.

Every rank computes its replicas by the same program from the same sums. A flipped bit or a faulty device changes one of
them and training goes on, since gradients are averaged, while the replicas drift apart. Checked is what
the layout has in full, and on a mesh with replicas also shards, between the ranks that hold the same one.

    checksum_r = sum over words i of (2 i + 1) * mix(word_i)   mod 2^32        of each leaf on rank r

``mix`` is a bijection that spreads each bit over the word, and the factor is odd: whatever changes a single word
changes the sum, and flips of the same bit in many words do not cancel. The program has one collective, an all-gather
of ``[num_leaves]`` words; the step's program stays as it is planned.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..communication.collectives import all_gather
from ..processes.replicas import ReplicaError
from ..tree import named_leaves
from .step import TrainState


def compare_replicas(state: TrainState, shardings: Any) -> None:
    """Raises a ReplicaError if ranks differ in what all hold in full; ``shardings`` are the state's, or a prefix."""
    mesh, specs = shardings.step.mesh, jax.tree.map(lambda sharding: sharding.spec, shardings)
    leaves = _replicated(state, specs, mesh)
    if not leaves:
        return
    arrays, of_leaves = [leaf for leaf, _ in leaves.values()], [spec for _, spec in leaves.values()]
    sums = np.asarray(_all_checksums(arrays, tuple(of_leaves), mesh))
    found = [_most_common(column, _groups(spec, mesh)) for column, spec in zip(sums.T, of_leaves, strict=True)]
    differing = [place for place, most in enumerate(found) if (sums[most, place] != sums[:, place]).any()]
    if not differing:
        return
    first = differing[0]
    ranks = np.flatnonzero(sums[found[first], first] != sums[:, first]).tolist()
    raise ReplicaError(list(leaves)[first], tuple(ranks), len(differing) - 1, int(state.step))


def _replicated(state: TrainState, specs: Any, mesh: Mesh | AbstractMesh) -> dict[str, tuple[jax.Array, PartitionSpec]]:
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    of_leaves = jax.tree.leaves(jax.tree.broadcast(specs, state, is_leaf=is_spec), is_leaf=is_spec)
    named = zip(named_leaves(state).items(), of_leaves, strict=True)
    return {name: (leaf, spec) for (name, leaf), spec in named if leaf.size and _groups(spec, mesh).shape[1] > 1}


def _groups(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> np.ndarray:
    """The ranks that hold the same of a leaf, ``[num_groups, ranks of each]``."""
    ranks = np.arange(mesh.size).reshape(mesh.axis_sizes)
    along = [place for place, axis in enumerate(mesh.axis_names) if axis not in jax.tree.leaves(tuple(spec))]
    count = math.prod(mesh.axis_sizes[dim] for dim in along)
    return np.moveaxis(ranks, along, range(ranks.ndim - len(along), ranks.ndim)).reshape(-1, count)


def _most_common(sums: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each rank one that holds what most ranks of its group hold, ``[num_ranks]``."""
    found = np.empty_like(sums, np.int32)
    for group in groups:
        of_group = sums[group].tolist()
        ((most, _),) = Counter(of_group).most_common(1)
        found[group] = group[of_group.index(most)]
    return found


@partial(jax.jit, static_argnames=("specs", "mesh"))
def _all_checksums(leaves: list[jax.Array], specs: tuple[PartitionSpec, ...], mesh: Mesh | AbstractMesh) -> jax.Array:
    """Gives ``[num_ranks, num_leaves]``, uint32."""

    def on_rank(leaves: list[jax.Array]) -> jax.Array:
        return all_gather(jnp.stack([_checksum(leaf) for leaf in leaves])[None], mesh.axis_names)

    return jax.shard_map(on_rank, mesh=mesh, in_specs=([*specs],), out_specs=PartitionSpec(), check_vma=False)(leaves)


def _checksum(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    elif jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    elif leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)  # 8 bytes become two words
    words = lax.bitcast_convert_type(leaf, unsigned).reshape(-1).astype(jnp.uint32)
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)  # as in MurmurHash3
    words = words ^ (words >> 13)
    return jnp.sum(words * (2 * lax.iota(jnp.uint32, words.size) + 1), dtype=jnp.uint32)
