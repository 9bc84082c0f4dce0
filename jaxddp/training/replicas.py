"""Whether ranks still hold the same: what several ranks hold of one array must be equal bit for bit.

Every rank computes its replicas by the same program from the same sums. A flipped bit or a faulty device changes one of
them and training goes on, since gradients are averaged, while the replicas drift apart. Compared are checksums, made on
each device; the step's program stays as it is planned.

    checksum = sum over words i of (2 i + 1) * mix(word_i)   mod 2^32        of each leaf on each rank

``mix`` is a bijection that spreads each bit over the word, and the factor is odd: whatever changes a single word
changes the sum, and flips of the same bit in many words do not cancel.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..processes.replicas import replicas_differ
from ..tree import named_leaves
from .step import TrainState


def compare_replicas(state: TrainState, mesh: Mesh) -> None:
    """Raises a ReplicaError if ranks differ in what they hold of the same part of a leaf."""
    named = named_leaves(state).items()
    # One on a single device, such as a learning rate that a user has set, has no replica.
    leaves = {name: leaf for name, leaf in named if leaf.size and len(leaf.sharding.device_set) > 1}
    sums = _all_checksums(list(leaves.values()), mesh)
    ranks = {device: rank for rank, device in enumerate(mesh.devices.flat)}
    differing: dict[str, list[int]] = {}
    for (name, leaf), column in zip(leaves.items(), sums.T.tolist(), strict=True):
        groups: dict[str, list[int]] = {}  # ranks by the part of the leaf that they hold
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            groups.setdefault(str(index), []).append(ranks[device])
        for group in groups.values():
            ((most, _),) = Counter(column[rank] for rank in sorted(group)).most_common(1)
            if others := [rank for rank in group if column[rank] != most]:
                differing.setdefault(name, []).extend(others)
    if differing:
        name, others = next(iter(differing.items()))
        raise replicas_differ(name, sorted(others), len(differing) - 1, int(state.step))


def _all_checksums(leaves: list[jax.Array], mesh: Mesh) -> np.ndarray:
    """Gives ``[num_ranks, num_leaves]``, uint32; processes exchange theirs."""
    arrays = [_checksum_by_device(mesh, leaf.sharding.spec)(leaf) for leaf in leaves]  # type: ignore[attr-defined]
    found = [{shard.device: np.asarray(shard.data)[0] for shard in array.addressable_shards} for array in arrays]
    sums = np.array([[of_leaf.get(device, 0) for of_leaf in found] for device in mesh.devices.flat], np.uint32)
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        sums = multihost_utils.process_allgather(sums).sum(0, dtype=np.uint32)  # a device is of one process
    return sums


@functools.cache
def _checksum_by_device(mesh: Mesh, spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    """Gives ``[num_ranks]``, without a collective; compiled once for a shape, not once for each device."""

    def on_device(held: jax.Array) -> jax.Array:
        return _checksum(held)[None]

    by_device = PartitionSpec(mesh.axis_names)
    checksums = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=by_device, check_vma=False)
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
