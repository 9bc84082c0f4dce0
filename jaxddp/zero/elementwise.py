"""Tests by tracing it whether an optimizer is element-wise, so that it may run on shards.

A rank's updates are those of the full parameter if element i of an update depends only on element i of gradient,
parameter and state, and on numbers that are equal on all ranks, such as counts, learning rates and the loss. ``init``
and ``update`` are traced on shapes, and every value is

    uniform     one number, equal at every element and on every rank
    aligned     its element i depends on elements i of arrays of its own shape, and on uniform values
    positional  equal on every rank, but not at every element: a ramp, noise, a constant mask
    mixed       anything else: sums, matrix products, sorts, loops, a parameter scaled by another one

Parameters that are cut and their state must become uniform or aligned, others uniform or positional; what reaches
neither is not restricted. An optimizer may also look at shapes, as a mask by size does. So it is traced on shards as
well, and every output must be the same expression.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..communication.traces import TRANSPARENT, checksum, constant_bytes, expression, interpret
from ..ddp import mirrored
from ..layout import Leaf
from ..tree import path_name

_WRAPPERS = TRANSPARENT - {"shard_map"}  # whose shapes differ inside
_RESHAPES = frozenset(("broadcast_in_dim", "reshape", "slice", "squeeze"))  # the identity if the shape stays the same
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil "
    "clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 "
    "floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt "
    "lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow "
    "real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta".split()
)
_on_rank = attrgetter("on_rank")  # of a ``Leaf``
_REFUSAL = (
    "optimizer must be element-wise to be sharded: {}; use a strategy that keeps the optimizer whole, or"
    " zero1(shard='leaves'); to clip by the global norm, set max_grad_norm, and to leave out steps that are not finite,"
    " nonfinite='skip'"
)


def shard_state(optimizer: optax.GradientTransformation, updated: Any) -> Any:
    """Lays out an optimizer's state as a tree of ``Leaf``: what mirrors a parameter of ``updated`` is cut like it.

    Refuses an optimizer whose update or state depends on elements at other places, or on shapes.
    """
    structs = jax.eval_shape(optimizer.init, jax.tree.map(_full, updated))
    with _blaming_shapes():
        on_rank = _same_structure(jax.eval_shape(optimizer.init, jax.tree.map(_on_rank, updated)), structs)

    def place(path: Any, full: Any, shard: Any, mirror: Leaf) -> Leaf:
        if mirror.on_rank.shape == shard.shape:
            return mirror
        if full.shape != shard.shape:
            what = f"the shape {full.shape} of its state {path_name(path)!r} depends on the sizes of parameters"
            raise ValueError(_REFUSAL.format(f"{what}, and is not that of the one that ends its path"))
        return Leaf(full.shape, full.dtype)

    state = jax.tree.map_with_path(place, structs, on_rank, mirrored(updated, structs))
    on_whole = _outputs(optimizer, updated, state, _full)
    with _blaming_shapes():
        on_shards = _outputs(optimizer, updated, state, _on_rank)
        for (label, *computation), (_, *on_shard) in zip(on_whole, on_shards, strict=True):
            if computation != on_shard:
                raise ValueError(f"{label} is another computation there; decide by path, or by ndim > 1")
    return state


def describe_update(optimizer: optax.GradientTransformation, params: Any, axis_env: list[Any]) -> str:
    """Describes what an optimizer computes, its numbers included, as text that all processes can compare.

    ``params`` are the full trainable ones, ``axis_env`` the names and sizes of the mesh axes whose ranks call it.
    """

    def first_step(grads: Any, params: Any, value: Any) -> Any:
        state = optimizer.init(params)
        return state, optax.with_extra_args_support(optimizer).update(grads, state, params, value=value)

    program = jax.make_jaxpr(first_step, axis_env=axis_env)(params, params, jnp.float32(0))
    return f"checksum {checksum(program, [True] * len(program.out_avals)):08x}"


_UNIFORM, _ALIGNED, _POSITIONAL, _MIXED = range(4)


class _Value(NamedTuple):
    """A value in a trace: its kind, the number of its expression, and what made it positional or mixed."""

    kind: int
    number: int
    cause: str = ""


def _follow(program: Any, inputs: Sequence[_Value]) -> list[_Value]:
    """The outputs of a traced program for its inputs. Equal expressions have equal numbers, also in other traces."""

    def constant(value: Any, atom: Any) -> _Value:
        data, size = constant_bytes(value, atom), math.prod(atom.aval.shape)
        one = data[: len(data) // max(size, 1)]
        if data == one * size:
            return _Value(_UNIFORM, expression(atom.aval.dtype, one))
        return _equal(atom.aval.shape, expression(atom.aval, data), "an array of constants")

    def combined(values: Sequence[_Value], *operation: Any) -> _Value:
        """An array of which each element is computed from elements of others at the same position."""
        number = expression(*operation, *(value.number for value in values))
        kind, _, cause = max(values, key=lambda value: value.kind, default=_Value(_UNIFORM, number))
        meet = {_ALIGNED, _POSITIONAL} <= {value.kind for value in values}
        return _Value(_MIXED if meet else kind, number, cause)

    def rule(equation: Any, operands: list[_Value]) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        shapes = tuple(atom.aval.shape for atom in equation.invars)
        out_shapes = [var.aval.shape for var in equation.outvars]
        if name == "optimization_barrier":
            return operands
        if name == "cond":
            index = _mixed(operands[0], "a choice by a parameter's value (cond)")
            options = zip(*(_follow(branch, operands[1:]) for branch in params["branches"]), strict=True)
            return [combined((index, *option), name) for option in options]
        if name in _RESHAPES:
            moves = name == "reshape" and params["dimensions"] not in (None, tuple(range(len(shapes[0]))))
            if operands[0].kind == _UNIFORM or (shapes[0] == out_shapes[0] and not moves):
                return operands[:1]
        if name in ELEMENTWISE:
            cause = f"a parameter of another shape ({name})"
            pairs = zip(operands, shapes, strict=True)
            met = [value if shape == out_shapes[0] else _mixed(value, cause) for value, shape in pairs]
            return [combined(met, name, params)]
        # Unlike those of element-wise operations, these results depend on the shapes of the inputs.
        cause = f"elements at other places ({name})"
        mixed, results = [_mixed(value, cause) for value in operands], []
        for place, shape in enumerate(out_shapes):
            found = combined(mixed, name, params, shapes, place)
            results.append(found if found.kind == _MIXED else _equal(shape, found.number, found.cause or cause))
        return results

    return interpret(program, inputs, rule, constant, _WRAPPERS)


def _mixed(value: _Value, cause: str) -> _Value:
    """A value after an operation that may move its elements."""
    return value._replace(kind=_MIXED, cause=cause) if value.kind == _ALIGNED else value


def _equal(shape: tuple[int, ...], number: int, cause: str) -> _Value:
    """An array that is equal on all ranks."""
    return _Value(_UNIFORM, number) if math.prod(shape) <= 1 else _Value(_POSITIONAL, number, cause)


def _full(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _outputs(
    optimizer: Any, params: Any, state: Any, part: Callable[[Leaf], jax.ShapeDtypeStruct]
) -> list[tuple[str, int, bool]]:
    """What an element-wise optimizer computes of parts: label, expression, and whether it has the part's shape."""
    update = optax.with_extra_args_support(optimizer).update
    given = (params, state, params, Leaf((), jnp.float32))
    traced, results = jax.make_jaxpr(
        lambda grads, state, params, value: (optimizer.init(params), *update(grads, state, params, value=value)),
        return_shape=True,
    )(*jax.tree.map(part, given))

    inputs = [
        _Value(_ALIGNED, place) if leaf.cut else _equal(leaf.shape, place, "an array that is not cut")
        for place, leaf in enumerate(jax.tree.leaves(given))
    ]
    values, found = iter(_follow(traced, inputs)), []
    for what, like, result in zip(("first state", "update of", "state"), (state, params, state), results, strict=True):
        structs = jax.tree.leaves(_same_structure(result, like))
        for (path, leaf), struct in zip(jax.tree.leaves_with_path(like), structs, strict=True):
            label, value = f"its {what} {path_name(path)!r}", next(values)
            if value.kind not in (_UNIFORM, _ALIGNED if leaf.cut else _POSITIONAL):
                cause = value.cause or "elements of a parameter that it does not mirror"
                raise ValueError(_REFUSAL.format(f"{label} depends on {cause}"))
            found.append((label, value.number, struct.shape == part(leaf).shape))
    return found


def _same_structure(tree: Any, like: Any) -> Any:
    if len({jax.tree.structure(tree), jax.tree.structure(like)}) > 1:
        raise ValueError("optimizer's state and updates must keep one structure")
    return tree


@contextmanager
def _blaming_shapes() -> Iterator[None]:
    """Explains errors that occur on shards only: the optimizer looks at shapes."""
    try:
        yield
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"optimizer looks at the shapes of parameters, and shards have others: {reason}") from error
