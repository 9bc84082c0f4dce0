"""Whether ranks still hold the same: what several ranks hold of one array must be equal bit for bit.

A flipped bit or a faulty device changes one of them and training goes on, since gradients are averaged. Compared are
checksums, made on each device:

    checksum = sum over words i of (2 i + 1) * mix(word_i)   mod 2^32        of each leaf on each rank

``mix`` is a bijection that spreads each bit over the word, and the factor is odd: any change of a single word changes
the sum, and flips of the same bit in many words do not cancel.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..processes.roll_call import replicas_differ
from ..tree import named_leaves
from .programs import no_mesh
from .train import Trainer, TrainState
from .validation import with_arrays


def check_replicas(trainer: Trainer, state: TrainState) -> None:
    """Checks that ranks which hold the same part of a leaf hold the same bits; a ReplicaError names leaf and ranks."""
    trainer._check_devices("check_replicas", "compile")
    trainer.programs(state)  # refuses another trainer's
    mesh: Any = trainer.mesh
    # One on a single device, such as a learning rate that a user has set, has no replica.
    named = named_leaves(with_arrays(state)).items()
    leaves = {name: leaf for name, leaf in named if leaf.size and len(leaf.sharding.device_set) > 1}
    if not leaves:
        return
    with trainer._watched(), no_mesh():
        by_device = jnp.stack([_by_device(mesh, leaf.sharding.spec)(leaf) for leaf in leaves.values()])
        sums = np.asarray(jax.device_put(by_device, NamedSharding(mesh, PartitionSpec())))
    differing: dict[str, list[int]] = {}
    for (name, leaf), of_ranks in zip(leaves.items(), sums.tolist(), strict=True):
        parts = leaf.sharding.devices_indices_map(leaf.shape)
        groups: dict[str, list[int]] = {}  # ranks by the part of the leaf that they hold
        for rank, device in enumerate(mesh.devices.flat):
            groups.setdefault(str(parts[device]), []).append(rank)
        for group in groups.values():
            ((most, _),) = Counter(of_ranks[rank] for rank in group).most_common(1)
            if others := [rank for rank in group if of_ranks[rank] != most]:
                differing.setdefault(name, []).extend(others)
    if differing:
        name, others = next(iter(differing.items()))
        raise replicas_differ(name, sorted(others), len(differing) - 1, int(state.step))


@functools.cache
def _by_device(mesh: Mesh, spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    """Gives the checksums of a leaf, ``[devices]``; compiled once for a shape, not once for each device."""
    by_device = PartitionSpec(mesh.axis_names)
    checksums = jax.shard_map(
        lambda held: _checksum(held)[None], mesh=mesh, in_specs=spec, out_specs=by_device, check_vma=False
    )
    return jax.jit(checksums, out_shardings=NamedSharding(mesh, by_device))  # else JAX drops axes that are not of ranks


def _checksum(leaf: Any) -> jax.Array:
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
