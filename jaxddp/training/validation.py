"""Checks of states and batches, and their description by shape and dtype alone."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..arguments import check_kind
from ..tree import named_leaves
from .step import TrainState

_shape_and_dtype = operator.attrgetter("shape", "dtype")


def one_line_errors(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes one line of an optimizer's complaint that it is not given what it needs.

    ``optax.lbfgs`` wants the loss function for its line search, ``optax.lookahead`` gradients of another tree.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        try:
            return optimizer.update(updates, state, params, **extra_args)
        except (TypeError, ValueError) as error:
            reason, *more = str(error).splitlines()
            if isinstance(error, ValueError) and not more:
                raise
            rule = "optimizer must update from gradients like the parameters, and value=loss, alone"
            raise ValueError(f"{rule}: {reason.strip()}") from error

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def check_state(state: TrainState) -> None:
    """Refuses what is no state of a trainer.

    Raises:
        ValueError: If it is none.
    """
    check_kind("state", state, TrainState, "a TrainState, as Trainer.init or abstract_state gives it")


def check_alive(state: TrainState) -> None:
    """Refuses a state that was donated to an earlier step: JAX 0.10 aborts the process when it runs on such arrays.

    Raises:
        ValueError: If it was donated, or is no state.
    """
    check_state(state)
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise ValueError(f"state (={type(state).__name__}) was donated to an earlier step: use the one it returned")


def as_arrays(state: TrainState) -> TrainState:
    """Turns Python numbers in an optimizer's state into arrays, such as a learning rate that the user has set."""
    if all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(state.opt_state)):
        return state
    return state._replace(opt_state=jax.tree.map(jnp.asarray, state.opt_state))


def check_batch(batch: Any, num_ranks: int, num_microbatches: int) -> None:
    """Refuses a batch that cannot be split.

    Args:
        batch: A tree of arrays whose dimension 0 counts examples.
        num_ranks: Ranks that share it.
        num_microbatches: Parts into which each rank splits its share.

    Raises:
        ValueError: If leaves are no arrays or differ in length, or the length cannot be divided.
    """
    length = count_examples(batch)
    if length % (num_ranks * num_microbatches) or length == 0:
        raise ValueError(
            f"batch (={length} examples) must be divisible by num_ranks x num_microbatches "
            f"(={num_ranks} x {num_microbatches})"
        )


def count_examples(batch: Any) -> int:
    """Counts the examples of a batch, which may be none.

    Raises:
        ValueError: If leaves are no arrays or differ in length.
    """
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
    """Turns other frameworks' arrays in a batch, such as PyTorch's tensors, into NumPy's, without a copy."""

    def host_array(leaf: Any) -> Any:
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic)) or not hasattr(leaf, "__array__"):
            return leaf
        leaf = leaf.detach().cpu() if hasattr(leaf, "detach") else leaf
        try:
            return np.asarray(leaf)
        except TypeError:  # NumPy has no bfloat16 of its own
            return jnp.from_dlpack(leaf)

    return jax.tree.map(host_array, batch)


def is_global(leaf: Any) -> bool:
    """Whether an array is one over several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def abstract(tree: Any) -> Any:
    """Describes arrays by shape and dtype, as JAX would hold them."""

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if is_key else jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(struct, tree)


def signature(*trees: Any) -> Any:
    """Gives a key that trees of the same structure, shapes and dtypes share."""
    leaves, structure = jax.tree.flatten(trees)
    return structure, tuple(map(_shape_and_dtype, leaves))
