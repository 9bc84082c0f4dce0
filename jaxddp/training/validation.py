"""Checks of states and batches, and their description by shape and dtype alone."""

from collections.abc import Sequence
from functools import partial
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..layout import Leaf, whole
from ..strategy import Masters
from ..tree import named_leaves, path_name
from ..zero.owners import OwnedState
from .step import TrainState


def check_state(state: TrainState) -> tuple[list[Any], Any]:
    """Flattens a state, and refuses what is none, and one that was donated: JAX 0.10 aborts when it runs on that."""
    if not isinstance(state, TrainState):
        raise ValueError(
            f"state (={type(state).__name__}) must be a TrainState, as Trainer.init or abstract_state gives it"
        )
    leaves, structure = jax.tree.flatten(state)
    kinds = {*map(type, leaves)}
    if any(issubclass(kind, jax.core.Tracer) for kind in kinds):
        raise ValueError("state must be of arrays: call a trainer outside of jax.jit, jax.lax.scan and the like")
    arrays = [kind for kind in kinds if hasattr(kind, "is_deleted")]
    gone = [type(leaf) in arrays and leaf.is_deleted() for leaf in leaves]
    if any(gone):
        name = [*named_leaves(state)][gone.index(True)]
        raise ValueError(f"state (={name!r}) was donated to an earlier step: use the state that it returned, or a copy")
    return leaves, structure


def with_arrays(state: TrainState) -> TrainState:
    """Makes arrays of NumPy's, and of numbers in the optimizer's state, such as a learning rate that a user has set."""

    def array(kinds: tuple[type, ...], leaf: Any) -> jax.Array:
        if not hasattr(leaf, "aval") and not isinstance(leaf, kinds):
            raise ValueError(f"state leaf (={leaf!r:.60}) must be an array")
        return leaf if hasattr(leaf, "aval") else jnp.asarray(leaf)

    opt_state = jax.tree.map(partial(array, (np.ndarray, Number)), state.opt_state)
    return jax.tree.map(partial(array, (np.ndarray,)), state._replace(opt_state=()))._replace(opt_state=opt_state)


def check_fits(state: TrainState, held: TrainState, trainer: Any) -> None:
    """Refuses a state that a trainer of other options has made, by structure and shapes of the optimizer's state."""
    mine, theirs = held.opt_state, state.opt_state
    rule = "state must be one that this trainer has made"
    options = (Masters, f"compute_dtype (={trainer.compute_dtype})"), (OwnedState, "strategy (shard='leaves')")
    for kind, option in options:
        if isinstance(mine, kind) != isinstance(theirs, kind):
            raise ValueError(f"{rule}: this one comes from a trainer with another {option}")
        if isinstance(mine, Masters):
            mine, theirs = mine.inner, theirs.inner
    if len({jax.tree.structure(mine), jax.tree.structure(theirs)}) > 1:
        raise ValueError(f"{rule}: this one is of another optimizer, trainable, or model")
    for (name, wanted), found in zip(named_leaves(mine).items(), jax.tree.leaves(theirs), strict=True):
        if jnp.shape(found) != wanted.shape:
            raise ValueError(
                f"{rule}: its opt_state {name!r} is {[*jnp.shape(found)]} where strategy {trainer.strategy.name!r} on"
                f" {trainer.ranks.num_shards} ranks holds {[*wanted.shape]}"
            )
    if trainer.has_state == (isinstance(state.model_state, tuple) and state.model_state == ()):
        raise ValueError(f"{rule}: this one comes from a trainer whose has_state is {not trainer.has_state}")


def leaf_specs(params: Any, param_specs: Any, mesh: Any, axes: Sequence[str]) -> Any:
    """Gives where full parameters lie along mesh axes that are not of ranks: a tree of ``Leaf``.

    ``param_specs`` is a tree of ``PartitionSpec`` like ``params``, or a prefix. Refused are trees that do not fit, and
    specs that name another axis, or one that does not divide a dimension.
    """
    if not axes:
        return whole(params)
    try:
        specs = jax.tree.broadcast(param_specs, params, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"param_specs must be a tree of PartitionSpec like params, or a prefix: {reason}") from error

    def place(path: Any, leaf: Any, spec: Any) -> Leaf:
        name = path_name(path)
        if not isinstance(spec, PartitionSpec) or not {*jax.tree.leaves(tuple(spec))} <= {*axes}:
            raise ValueError(f"param_specs of {name!r} (={spec}) must be a PartitionSpec over {', '.join(axes)}")
        try:
            block = NamedSharding(mesh, spec).shard_shape(tuple(leaf.shape))
        except Exception as error:  # too long a spec, or an axis twice, is of other kinds
            sizes = ", ".join(f"{axis} {mesh.shape[axis]}" for axis in axes) + ", each once"
            raise ValueError(
                f"param_specs of {name!r} (={spec}) must divide its shape {[*leaf.shape]} by the axes' sizes: {sizes}"
            ) from error
        counts = tuple(size // part if part else 1 for size, part in zip(leaf.shape, block, strict=True))
        return Leaf(tuple(leaf.shape), leaf.dtype, None, spec, counts if any(spec) else ())

    return jax.tree_util.tree_map_with_path(place, params, specs)


def check_batch(batch: Any, num_ranks: int, num_microbatches: int) -> None:
    """Refuses a batch that cannot be split over ranks, and by each of them into micro-batches."""
    length = count_examples(batch)
    if length % (num_ranks * num_microbatches) or length == 0:
        raise ValueError(
            f"batch (={length} examples) must be divisible by num_ranks x num_microbatches "
            f"(={num_ranks} x {num_microbatches})"
        )


def count_examples(batch: Any) -> int:
    """Counts the examples of a batch, which may be none; refuses leaves that are no arrays or differ in length."""
    leaves = named_leaves(batch)
    if not leaves:
        raise ValueError(f"batch (={batch!r}) must hold at least one array")
    lengths = {}
    for name, leaf in leaves.items():
        if not hasattr(leaf, "shape") or leaf.ndim == 0:
            raise ValueError(f"batch leaf {name!r} (={leaf!r}) must be an array whose dimension 0 counts examples")
        lengths[name] = leaf.shape[0]
    if len(set(lengths.values())) != 1:
        raise ValueError(f"batch leaves must agree in length, they have {lengths}")
    return next(iter(lengths.values()))


def host_arrays(batch: Any) -> Any:
    """Turns other frameworks' arrays in a batch, such as PyTorch's tensors, into NumPy's, without a copy.

    Raises:
        ValueError: If an integer does not fit into what JAX keeps of it, 32 bits without x64.
    """
    leaves, structure = jax.tree.flatten(batch)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) or not hasattr(leaf, "__array__"):
            continue
        leaf = leaf.detach().cpu() if hasattr(leaf, "detach") else leaf  # noqa: PLW2901
        try:
            array = np.asarray(leaf)
        except TypeError:  # NumPy has no bfloat16 of its own
            leaves[place] = jnp.from_dlpack(leaf)
            continue
        leaves[place], kept = array, jax.dtypes.canonicalize_dtype(array.dtype)
        if array.dtype.kind in "iu" and array.dtype != kept and array.size:
            for value in (array.max(), array.min()):
                if value != value.astype(kept):
                    name = [*named_leaves(batch)][place]
                    raise ValueError(f"batch leaf {name!r} (={value}) must fit in {kept}: set jax_enable_x64")
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
