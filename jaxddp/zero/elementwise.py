"""Tests whether an optimizer may run on shards: traced on full parameters and on shards, it must be one computation.

Element i of an update may depend on elements i of gradient, parameter and state, and on numbers that are equal on all
ranks, such as counts and the loss. In the ``expressions`` of a trace, sums, sorts, ramps and noise differ on shards.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..communication.traces import Value, expressions
from ..ddp import mirrored
from ..layout import Leaf
from ..tree import named_leaves


def shard_state(optimizer: optax.GradientTransformation, updated: Any) -> Any:
    """Lays out an optimizer's state as a tree of ``Leaf``: what mirrors a parameter of ``updated`` is cut like it.

    Refuses an optimizer whose update or state depends on elements at other places, or on shapes.
    """
    structs = jax.eval_shape(optimizer.init, jax.tree.map(_full, updated))

    def place(full: Any, mirror: Leaf, shard: Any) -> Leaf:
        return mirror if _shard(mirror).shape == shard.shape else Leaf(full.shape, full.dtype)

    with _refusing():
        on_shards = jax.eval_shape(optimizer.init, jax.tree.map(_shard, updated))
        state = jax.tree.map(place, structs, mirrored(updated, structs), on_shards)
    of_full = _computations(optimizer, updated, state, _full)
    with _refusing():
        of_shards = _computations(optimizer, updated, state, _shard)
        for name, computation in of_full.items():
            if of_shards[name] != computation:
                raise ValueError(f"{name!r} is another computation")
    return state


def describe_update(optimizer: optax.GradientTransformation, params: Any, axis_env: list[Any]) -> str:
    """What an optimizer computes of full ``params``, as text; ``axis_env``: names and sizes of the ranks' mesh axes."""

    def first_step(grads: Any, params: Any, value: Any) -> Any:
        state = optimizer.init(params)
        return state, optax.with_extra_args_support(optimizer).update(grads, state, params, value=value)

    program = jax.make_jaxpr(first_step, axis_env=axis_env)(params, params, jnp.float32(0))
    values = expressions(program, [Value(place) for place in range(len(program.in_avals))])
    return f"checksum {zlib.crc32(str(values).encode()):08x}"


def _full(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _shard(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """A rank's part, or half of the full shape where that is the part, as on one rank; of one element, twice."""
    shape = leaf.on_rank.shape
    if leaf.cut is not None and shape == leaf.shape:
        dim = len(shape) - 1 if leaf.cut.dim is None else leaf.cut.dim
        half = math.ceil(shape[dim] / 2)
        shape = (*shape[:dim], half if half < shape[dim] else 2 * half, *shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _computations(
    optimizer: Any, params: Any, state: Any, part: Callable[[Leaf], jax.ShapeDtypeStruct]
) -> dict[str, tuple[int, bool]]:
    """What an optimizer computes of parts, by name: the number of its expression, and whether it has their shape."""

    def compute(grads: Any, state: Any, params: Any, value: Any) -> dict[str, Any]:
        updates, after = optax.with_extra_args_support(optimizer).update(grads, state, params, value=value)
        return {"first": optimizer.init(params), "update": updates, "state": after}

    given = (params, state, params, Leaf((), jnp.float32))
    traced, results = jax.make_jaxpr(compute, return_shape=True)(*jax.tree.map(part, given))
    leaves = enumerate(jax.tree.leaves(given))
    inputs = [Value(place, leaf.cut is None and math.prod(leaf.shape) <= 1) for place, leaf in leaves]
    like = {"first": state, "update": params, "state": state}
    is_like = jax.tree.map(lambda leaf, struct: struct.shape == part(leaf).shape, like, results)
    pairs = zip(named_leaves(is_like).items(), expressions(traced, inputs), strict=True)
    return {name: (value.number, has_shape) for (name, has_shape), value in pairs}


@contextmanager
def _refusing() -> Iterator[None]:
    """Says of errors that occur on shards alone what they mean."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer must be element-wise to be sharded: on shards, {str(error).splitlines()[0]}; use a strategy"
            " that keeps the optimizer whole, or zero1(shard='leaves'); to clip by the global norm, set max_grad_norm,"
            " to leave out steps that are not finite, nonfinite='skip', and to choose parameters, go by path, or by"
            " ndim > 1"
        ) from error
