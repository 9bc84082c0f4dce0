"""Places a tree of full arrays on a mesh, each leaf full on every rank or in shards, and gathers it again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..communication.collectives import Axis
from ..layout import Leaf
from ..tree import is_key, named_leaves
from .programs import no_mesh

PIECE_BYTES = 2**25  # in which process 0 broadcasts an array


def describe(tree: Any) -> dict[str, str]:
    """Gives shapes and dtypes by name."""
    return {name: f"{[*leaf.shape]} {leaf.dtype}" for name, leaf in named_leaves(tree).items()}


def from_first_process(tree: Any) -> Any:
    """Gives every process the arrays of process 0, as NumPy arrays or keys; no device ever holds more than a piece."""

    def receive(array: Any) -> Any:
        if isinstance(array, jax.Array) and is_key(array):
            return jax.random.wrap_key_data(receive(jax.random.key_data(array)), impl=array.dtype)
        mine: Any = np.asarray(array)
        received = np.empty(mine.nbytes, np.uint8)
        sent = np.ascontiguousarray(mine).reshape(-1).view(np.uint8)
        for start in range(0, received.size, PIECE_BYTES):
            piece = slice(start, start + PIECE_BYTES)
            received[piece] = multihost_utils.broadcast_one_to_all(sent[piece])
        return received.view(mine.dtype).reshape(mine.shape)

    with jax.transfer_guard("allow"):  # it looks for copies that nobody asked for
        return jax.tree.map(receive, tree)


def place(tree: Any, layout: Any, mesh: Mesh | AbstractMesh, axis: Axis | None = None) -> Any:
    """Copies full arrays onto the ranks, as ``layout`` has them; no device ever holds more of a leaf than it keeps.

    Ranks lie along ``axis``, all axes of the mesh if None. Keys may be given as their data.
    """

    def put(array: Any, leaf: Leaf) -> jax.Array:
        if is_key(leaf):
            data = jax.random.key_data(array) if is_key(array) else array
            return jax.random.wrap_key_data(put(data, Leaf(data.shape, data.dtype)), impl=leaf.dtype)
        sharding = leaf.sharding(mesh, mesh.axis_names if axis is None else axis)
        if leaf.cut is None and jax.process_count() == 1:
            # Copied first: device_put may hand on the caller's own buffer, which the first step would then donate.
            return jax.device_put(jnp.array(array, leaf.dtype, copy=True), sharding)
        held: Any = leaf.to_global(np.array(array, leaf.dtype))
        return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])

    with jax.transfer_guard("allow"):
        return jax.tree.map(put, tree, layout)


def full_arrays(tree: Any, layout: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Undoes ``place``: every rank gets a copy of every full leaf, without padding."""
    everywhere = jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
    with no_mesh():
        return jax.tree.map(
            lambda array, leaf: _unpadded(leaf, array) if leaf.is_padded else jnp.copy(array), everywhere, layout
        )


_unpadded = jax.jit(Leaf.from_global, static_argnums=0)  # one program for a leaf, not one for each of its operations
