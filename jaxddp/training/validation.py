"""Checks of states and batches, and their description by shape and dtype alone."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..layout import Leaf, whole
from ..tree import named_leaves, path_name
from .step import TrainState


def check_state(state: TrainState) -> tuple[list[Any], Any]:
    """Flattens a state, and refuses what is none, and one that was donated: JAX 0.10 aborts when it runs on that."""
    if not isinstance(state, TrainState):
        raise ValueError(f"state (={type(state).__name__}) must be a TrainState, as Trainer.init gives it")
    leaves, structure = jax.tree.flatten(state)
    gone = [getattr(leaf, "is_deleted", bool)() for leaf in leaves]  # JAX refuses to say it of what is traced
    if any(gone):
        name = [*named_leaves(state)][gone.index(True)]
        raise ValueError(f"state (={name!r}) was donated to an earlier step: use the state that it returned, or a copy")
    return leaves, structure


def with_arrays(state: Any) -> Any:
    """Makes arrays of numbers that a user has set in a state, such as a learning rate."""
    kinds = jax.Array, jax.ShapeDtypeStruct
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, kinds) else jnp.asarray(leaf), state)


def leaf_specs(params: Any, param_specs: Any, mesh: Any, axes: Sequence[str]) -> Any:
    """Gives where full parameters lie along mesh axes that are not of ranks: a tree of ``Leaf``.

    ``param_specs`` is a tree of ``PartitionSpec`` like ``params``, or a prefix. A ValueError refuses what does not fit.
    """
    if not axes:
        return whole(params)
    specs = jax.tree.broadcast(param_specs, params, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))

    def place(path: Any, leaf: Any, spec: Any) -> Leaf:
        name = path_name(path)
        if not isinstance(spec, PartitionSpec) or not {*jax.tree.leaves(tuple(spec))} <= {*axes}:
            raise ValueError(f"param_specs of {name!r} (={spec}) must be a PartitionSpec over {', '.join(axes)}")
        try:
            block = NamedSharding(mesh, spec).shard_shape(tuple(leaf.shape))
        except Exception as error:  # too long a spec, or an axis twice, is of other kinds
            raise ValueError(f"param_specs of {name!r} (={spec}) must divide its shape {[*leaf.shape]}") from error
        counts = tuple(size // part if part else 1 for size, part in zip(leaf.shape, block, strict=True))
        return Leaf(tuple(leaf.shape), leaf.dtype, None, spec, counts if any(spec) else ())

    return jax.tree_util.tree_map_with_path(place, params, specs)


def check_batch(batch: Any, num_ranks: int, num_microbatches: int) -> None:
    """Refuses a batch that cannot be split over ranks, and by each of them into micro-batches."""
    length = count_examples(batch)
    if length % (num_ranks * num_microbatches) or length == 0:
        parts = f"num_ranks x num_microbatches (={num_ranks} x {num_microbatches})"
        raise ValueError(f"batch (={length} examples) must be divisible by {parts}")


def count_examples(batch: Any) -> int:
    """Counts the examples of a batch, which may be none; refuses leaves that are no arrays or differ in length."""
    leaves = named_leaves(batch)
    found = {
        name: leaf.shape[0] if getattr(leaf, "shape", ()) else type(leaf).__name__ for name, leaf in leaves.items()
    }
    lengths = {*found.values()}
    if len(lengths) != 1 or not isinstance(length := lengths.pop(), int):
        shown = dict(itertools.islice(found.items(), 8))  # lists have a leaf for each number
        raise ValueError(f"batch (={shown}) must be arrays whose dimension 0 counts examples, the same number in all")
    return length


def host_arrays(batch: Any) -> Any:
    """Turns arrays in a batch, such as PyTorch's tensors, into NumPy's of the dtypes that JAX keeps, if they fit."""
    leaves, structure = jax.tree.flatten(batch)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) or not hasattr(leaf, "__array__"):
            continue
        leaf = leaf.detach().cpu() if hasattr(leaf, "detach") else leaf  # noqa: PLW2901
        array = np.asarray(leaf)
        # Cast here: under x64, device_put may give float32 again for an array that it took without (jax 0.10, 0.12).
        leaves[place] = kept = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        if array.dtype.kind in "iu" and array.dtype != kept.dtype and (array != kept).any():
            name = [*named_leaves(batch)][place]
            raise ValueError(f"batch leaf {name!r} (={array.max()}) must fit in {kept.dtype}: set jax_enable_x64")
    return jax.tree.unflatten(structure, leaves)


def is_global(leaf: Any) -> bool:
    """Whether an array is one over several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def abstract(tree: Any, sharding: NamedSharding | None = None) -> Any:
    """Describes arrays by shape and dtype, as JAX would hold them, and by a sharding if there is one."""
    held = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)  # those of keys too
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, held(leaf.dtype), sharding=sharding), tree)


def signature(*trees: Any) -> Any:
    """Gives a key that trees of the same structure, shapes and dtypes share."""
    leaves, structure = jax.tree.flatten(trees)
    # A list: every step asks for this, and a generator takes twice as long.
    return structure, tuple([(getattr(leaf, "shape", ()), getattr(leaf, "dtype", None)) for leaf in leaves])
