"""Tests by tracing it whether an optimizer is element-wise, so that it may run on shards.

A rank's optimizer sees a part of each parameter, in another shape. Its updates are those of the full parameter if
element i of an update depends only on element i of gradient, parameter and state, and on numbers that are equal on all
ranks, such as counts, learning rates and the loss. No list of optimizers is kept: ``init`` and ``update`` are traced on
shapes, and every value is

    uniform     one number, equal at every element and on every rank
    aligned     its element i depends on elements i of arrays of its own shape, and on uniform values
    positional  equal on every rank, but not at every element: a ramp, noise, a constant mask
    mixed       anything else: sums, matrix products, sorts, a parameter scaled by another one

Element-wise operations on aligned values give aligned values; all other operations give mixed ones, loops included,
because their bodies are not analysed. Aligned combined with positional is mixed. Parameters that are cut and their
state are aligned, others equal on every rank: the former must become uniform or aligned, the latter uniform or
positional. Values that reach neither are not restricted.

An optimizer may also look at shapes, as a mask by size does. So it is traced on shards as well, and every output must
be the same expression. A shard has as many dimensions as its parameter, and at least one, so masks by ``ndim > 1``
agree.
"""

from __future__ import annotations

import enum
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..interpreter import TRANSPARENT, called_program, interpret
from ..layout import Leaf
from ..replicated import find_mirror
from ..strategy import Optimizer, of_optax
from ..tree import named_leaves, path_name

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
_CAUSES = {
    "dot_general": "a product summed over elements",
    "iota": "the place of elements",
    "random_bits": "random numbers by place",
    "reduce_and": "all elements together",
    "reduce_max": "all elements together",
    "reduce_or": "all elements together",
    "reduce_sum": "a sum over elements",
}
_REFUSAL = (
    "optimizer must be element-wise to be sharded: {}; use a strategy that keeps the optimizer whole, or"
    " zero1(shard='leaves')"
)


def shard_state(optimizer: Any, updated: Any) -> tuple[Any, Optimizer]:
    """Lays out the state of an optimizer of shards, and makes it run there.

    Args:
        optimizer: An optax transformation.
        updated: The trained parameters, a tree of ``Leaf``, some of them cut.

    Returns:
        A tree of ``Leaf`` like the state, and the optimizer.

    Raises:
        ValueError: If it is not element-wise.
    """
    state = shard_leaves(optimizer, updated)
    check_elementwise(optimizer, updated, state)
    return state, of_optax(optimizer)


def shard_leaves(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Lays out an optimizer's state: what mirrors a parameter is cut like it.

    Args:
        optimizer: The optimizer; traced, not run.
        params: The trainable parameters: a tree of ``Leaf``, some of them cut.

    Returns:
        A tree of ``Leaf`` like the state.

    Raises:
        ValueError: If a leaf's shape or existence depends on parameters that it does not mirror.
    """
    state = jax.eval_shape(optimizer.init, jax.tree.map(_full, params))
    with _blaming_shapes():
        on_rank = _same_structure(jax.eval_shape(optimizer.init, jax.tree.map(_shard, params)), state)
    leaves = named_leaves(params)

    def place(path: Any, full: Any, shard: Any) -> Leaf:
        mirror = find_mirror(leaves, path, full)
        if mirror is not None and mirror.on_rank.shape == shard.shape:
            return replace(mirror, dtype=full.dtype)
        if full.shape != shard.shape:
            what = f"the shape {full.shape} of its state {path_name(path)!r} depends on the sizes of parameters"
            raise ValueError(_REFUSAL.format(f"{what}, and is not that of the one that ends its path"))
        return Leaf(full.shape, full.dtype)

    return jax.tree.map_with_path(place, state, on_rank)


def check_elementwise(optimizer: optax.GradientTransformation, params: Any, state: Any) -> None:
    """Refuses an optimizer that would update shards differently from full parameters.

    Args:
        optimizer: The optimizer; traced, not run.
        params: The trainable parameters: a tree of ``Leaf``, some of them cut.
        state: Its state, from ``shard_leaves``.

    Raises:
        ValueError: If an update or the state depends on elements at other places, or on shapes.
    """
    expressions = _Expressions()
    full = _outputs(optimizer, params, state, _full, expressions)
    with _blaming_shapes():
        on_shards = _outputs(optimizer, params, state, _shard, expressions)
        for (label, *computation), (_, *on_shard) in zip(full, on_shards, strict=True):
            if computation != on_shard:
                raise ValueError(f"{label} is another computation there; decide by path, or by ndim > 1")


def describe_update(optimizer: optax.GradientTransformationExtraArgs, params: Any, axis_env: list[Any]) -> str:
    """Describes what an optimizer computes, its numbers included, as text that all processes can compare.

    Args:
        optimizer: The optimizer; traced, not run.
        params: The full trainable parameters: a tree of arrays or ``jax.ShapeDtypeStruct``.
        axis_env: Names and sizes of the mesh axes whose ranks call it.

    Returns:
        A checksum of ``init`` and ``update``.

    Example:
        >>> texts = {describe_update(optax.with_extra_args_support(optax.sgd(lr)), jnp.ones(3), []) for lr in (1, 2, 2)}
        >>> len(texts)
        2
    """
    params, value = jax.eval_shape(lambda tree: tree, params), jax.ShapeDtypeStruct((), jnp.float32)
    first, state = jax.make_jaxpr(optimizer.init, axis_env=axis_env, return_shape=True)(params)
    update = jax.make_jaxpr(
        lambda grads, state, params, value: optimizer.update(grads, state, params, value=value), axis_env=axis_env
    )(params, state, params, value)
    expressions, outputs = _Expressions(), []
    for program in (first, update):
        inputs = [_Value(_Kind.UNIFORM, expressions.number("input", place)) for place in range(len(program.in_avals))]
        outputs.append([value.number for value in expressions.follow(program, inputs)])
    text = re.sub(r"0x[0-9a-f]+", "", f"{expressions} {outputs}")  # functions are printed with their addresses
    return f"checksum {zlib.crc32(text.encode()):08x}"


class _Kind(enum.Enum):
    UNIFORM, ALIGNED, POSITIONAL, MIXED = range(4)


class _Value(NamedTuple):
    """A value in a trace: its kind, the number of its expression, and what made it positional or mixed."""

    kind: _Kind
    number: int
    cause: str = ""


class _Expressions:
    """Follows values through traces. Equal expressions have equal numbers, also in different traces."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def __repr__(self) -> str:
        return repr(list(self._numbers))

    def number(self, *expression: Any) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))

    def follow(self, program: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """The outputs of a traced program for its inputs."""
        return self._values(program.jaxpr.outvars, interpret(program, inputs, self._results))

    def _values(self, atoms: Sequence[Any], found: Sequence[Any]) -> list[_Value]:
        """What is not yet a value is a constant of the trace."""
        return [
            value if isinstance(value, _Value) else self._constant(value, atom.aval.dtype)
            for atom, value in zip(atoms, found, strict=True)
        ]

    def _results(self, equation: Any, inputs: list[Any]) -> list[_Value]:
        name, params, operands = equation.primitive.name, equation.params, self._values(equation.invars, inputs)
        shapes = tuple(atom.aval.shape for atom in equation.invars)
        out_shapes = [var.aval.shape for var in equation.outvars]
        if name in _WRAPPERS:
            return self.follow(called_program(equation), operands)
        if name == "optimization_barrier":
            return operands
        if name == "cond":
            index = _mixed(operands[0], "a choice by a parameter's value (cond)")
            options = zip(*(self.follow(branch, operands[1:]) for branch in params["branches"]), strict=True)
            return [self._combined((index, *option), name) for option in options]
        if name in _RESHAPES:
            moves = name == "reshape" and params["dimensions"] not in (None, tuple(range(len(shapes[0]))))
            if operands[0].kind is _Kind.UNIFORM or (shapes[0] == out_shapes[0] and not moves):
                return operands[:1]
        if name in ELEMENTWISE:
            cause = f"a parameter of another shape ({name})"
            met = [_mixed(value, cause, shape != out_shapes[0]) for value, shape in zip(operands, shapes, strict=True)]
            return [self._combined(met, name, str(params))]
        cause, results = f"{_CAUSES.get(name, 'elements at other places')} ({name})", []
        for place, shape in enumerate(out_shapes):
            # Unlike those of element-wise operations, these results depend on the shapes of the inputs.
            result = self._combined([_mixed(value, cause) for value in operands], name, str(params), shapes, place)
            equal = _equal(shape, result.number, result.cause or cause)
            results.append(result if result.kind is _Kind.MIXED else equal)
        return results

    def _combined(self, values: Sequence[_Value], *operation: Any) -> _Value:
        """Describes an array of which each element is computed from elements of others at the same position."""
        number = self.number(*operation, *(value.number for value in values))
        first = {value.kind: value for value in reversed(values)}
        if mixed := first.get(_Kind.MIXED):
            return mixed._replace(number=number)
        if positional := first.get(_Kind.POSITIONAL):
            return _Value(_Kind.MIXED if _Kind.ALIGNED in first else _Kind.POSITIONAL, number, positional.cause)
        return _Value(_Kind.ALIGNED if _Kind.ALIGNED in first else _Kind.UNIFORM, number)

    def _constant(self, value: Any, dtype: Any) -> _Value:
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        value = value if is_key else np.asarray(value, dtype)
        data = np.asarray(jax.random.key_data(value) if is_key else value).tobytes()
        one = data[: len(data) // max(value.size, 1)]
        if data == one * value.size:
            return _Value(_Kind.UNIFORM, self.number(str(dtype), one))
        return _equal(value.shape, self.number(str(dtype), value.shape, data), "an array of constants")


def _mixed(value: _Value, cause: str, moves: bool = True) -> _Value:
    """Describes a value after an operation that may move its elements."""
    return value._replace(kind=_Kind.MIXED, cause=cause) if moves and value.kind is _Kind.ALIGNED else value


def _equal(shape: tuple[int, ...], number: int, cause: str) -> _Value:
    """Describes an array that is equal on all ranks."""
    return _Value(_Kind.UNIFORM, number) if math.prod(shape) <= 1 else _Value(_Kind.POSITIONAL, number, cause)


def _full(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _shard(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return leaf.on_rank


def _outputs(
    optimizer: optax.GradientTransformation,
    params: Any,
    state: Any,
    part: Callable[[Leaf], jax.ShapeDtypeStruct],
    expressions: _Expressions,
) -> list[tuple[str, int, bool]]:
    """What an element-wise optimizer computes of parts: label, expression, and whether it has the part's shape."""
    update = optax.with_extra_args_support(optimizer).update
    given, arguments = (params, state, params), jax.tree.map(part, (params, state, params))
    traced, results = jax.make_jaxpr(
        lambda grads, state, params, value: (optimizer.init(params), *update(grads, state, params, value=value)),
        return_shape=True,
    )(*arguments, jax.ShapeDtypeStruct((), jnp.float32))

    def value_of(place: int, leaf: Leaf) -> _Value:
        number = expressions.number("input", place)
        is_equal = leaf.cut is None
        return _equal(leaf.shape, number, "an array that is not cut") if is_equal else _Value(_Kind.ALIGNED, number)

    inputs = [value_of(place, leaf) for place, leaf in enumerate((*jax.tree.leaves(given), Leaf((), jnp.float32)))]
    values, found = iter(expressions.follow(traced, inputs)), []
    for what, like, result in zip(("first state", "update of", "state"), (state, params, state), results, strict=True):
        structs = jax.tree.leaves(_same_structure(result, like))
        for (path, leaf), struct in zip(jax.tree.leaves_with_path(like), structs, strict=True):
            label, value = f"its {what} {path_name(path)!r}", next(values)
            if value.kind not in (_Kind.UNIFORM, _Kind.POSITIONAL if leaf.cut is None else _Kind.ALIGNED):
                cause = value.cause or "elements of a parameter that it does not mirror"
                clip = "; to clip by the global norm, set max_grad_norm" if "(reduce_sum)" in cause else ""
                raise ValueError(_REFUSAL.format(f"{label} depends on {cause}") + clip)
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
