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
because their bodies are not analysed. Aligned combined with positional is mixed. Updates and sharded state must be
uniform or aligned, replicated state uniform or positional. Values that reach neither are not restricted.

An optimizer may also look at shapes, as a mask by size does. So it is traced on shards as well, and every output must
be the same expression. A shard has as many dimensions as its parameter, and at least one, so masks by ``ndim > 1``
agree.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from ..communication.backward_order import TRANSPARENT
from ..communication.buckets import chunk_elements
from ..tree import named_leaves, path_name
from .clipping import GLOBAL_NORM, on_full

_PROBE_ELEMENTS = 1009  # size of the first made-up shard
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


@dataclass(frozen=True)
class StateLeaf:
    """A leaf of an optimizer's state.

    Attributes:
        param: Dotted name of the parameter that it mirrors, element by element; None if it is replicated.
        shape: Its shape where parameters are full.
        dtype: Its dtype.
    """

    param: str | None
    shape: tuple[int, ...]
    dtype: Any


def sharded_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Finds which leaves of an optimizer's state mirror a parameter, and are therefore sharded like it.

    ``init`` is traced on shards of made-up sizes, all different, so that a leaf's shape identifies its parameter.

    Args:
        optimizer: The optimizer.
        params: The full trainable parameters: a tree of arrays or ``jax.ShapeDtypeStruct``.

    Returns:
        A tree like the optimizer's state, of ``StateLeaf``.

    Raises:
        ValueError: If a leaf's shape or existence depends on parameters that it does not mirror.

    Example:
        >>> optimizer = optax.sgd(optax.linear_schedule(0.1, 0.0, 9), momentum=0.9)
        >>> state = sharded_state(optimizer, {"w": jnp.ones((3, 4))})
        >>> [(leaf.param, leaf.shape) for leaf in jax.tree.leaves(state)]
        [('w', (3, 4)), (None, ())]
    """
    params = _abstract(params)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params).items()}
    sizes = itertools.count(_PROBE_ELEMENTS)
    probes = [_flat(params, lambda leaf: next(sizes)) for _ in range(2)]
    state = jax.eval_shape(optimizer.init, params)
    with _blaming_shapes():
        probed = [_same_structure(jax.eval_shape(optimizer.init, probe), state) for probe in probes]
    param_of = dict(zip(zip(*map(_shapes, probes), strict=True), shapes, strict=True))
    paths, structure = jax.tree.flatten_with_path(state)
    leaves = []
    for (path, leaf), of_probes in zip(paths, zip(*map(_shapes, probed), strict=True), strict=True):
        param = param_of.get(of_probes)
        if {leaf.shape} != ({*of_probes} if param is None else {shapes[param]}):
            what = f"the shape {leaf.shape} of its state {path_name(path)!r}"
            raise ValueError(_REFUSAL.format(f"{what} depends on the sizes of parameters and is that of none"))
        leaves.append(StateLeaf(param, leaf.shape, leaf.dtype))
    return jax.tree.unflatten(structure, leaves)


def check_elementwise(
    optimizer: optax.GradientTransformation, params: Any, shard_shapes: Any = None, **extra_args: Any
) -> None:
    """Refuses an optimizer that would update shards differently from full parameters.

    Args:
        optimizer: The optimizer; traced, not run.
        params: The full trainable parameters: a tree of arrays or ``jax.ShapeDtypeStruct``.
        shard_shapes: A rank's shards of them, as a tree of ``jax.ShapeDtypeStruct``; those of 2 ranks if None.
        **extra_args: Other arguments of ``update``, such as ``value``; equal on every rank.

    Raises:
        ValueError: If an update or the state depends on elements at other places, or on shapes.
    """
    params = _abstract(params)
    shards = _flat(params, lambda leaf: chunk_elements(leaf.size, 2)) if shard_shapes is None else shard_shapes
    state, expressions = sharded_state(optimizer, params), _Expressions()
    with on_full(params):
        whole = _computations(optimizer, params, state, extra_args, expressions)
    with _blaming_shapes():
        cut = _computations(optimizer, shards, state, extra_args, expressions)
        for (label, computation), (_, on_shard) in zip(whole, cut, strict=True):
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
    params, value = _abstract(params), jax.ShapeDtypeStruct((), jnp.float32)
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


@dataclass(frozen=True)
class _Value:
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
        jaxpr = getattr(program, "jaxpr", program)
        constants = [self._constant(value) for value in getattr(program, "consts", ())]
        values = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*inputs, *constants), strict=True))

        def read(atom: Any) -> _Value:
            is_literal = isinstance(atom, core.Literal)
            return self._constant(np.asarray(atom.val, atom.aval.dtype)) if is_literal else values[atom]

        for equation in jaxpr.eqns:
            results = self._results(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, equation: Any, operands: list[_Value]) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        shapes = tuple(atom.aval.shape for atom in equation.invars)
        out_shapes = [var.aval.shape for var in equation.outvars]
        if params.get("name") == GLOBAL_NORM:
            return [_Value(_Kind.UNIFORM, self.number(GLOBAL_NORM, *(value.number for value in operands)))]
        if name in _WRAPPERS:
            return self.follow(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"], operands)
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
        cause = f"{_CAUSES.get(name, 'elements at other places')} ({name})"
        results = []
        for place, shape in enumerate(out_shapes):
            # Unlike those of element-wise operations, these results depend on the shapes of the inputs.
            result = self._combined([_mixed(value, cause) for value in operands], name, str(params), shapes, place)
            whole = _replicated(shape, result.number, result.cause or cause)
            results.append(result if result.kind is _Kind.MIXED else whole)
        return results

    def _combined(self, values: Sequence[_Value], *operation: Any) -> _Value:
        """Describes an array of which each element is computed from elements of others at the same position."""
        number = self.number(*operation, *(value.number for value in values))
        first = {value.kind: value for value in reversed(values)}
        if mixed := first.get(_Kind.MIXED):
            return replace(mixed, number=number)
        if positional := first.get(_Kind.POSITIONAL):
            return _Value(_Kind.MIXED if _Kind.ALIGNED in first else _Kind.POSITIONAL, number, positional.cause)
        return _Value(_Kind.ALIGNED if _Kind.ALIGNED in first else _Kind.UNIFORM, number)

    def _constant(self, value: Any) -> _Value:
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(value) if is_key else value).tobytes()
        one = data[: len(data) // max(value.size, 1)]
        if data == one * value.size:
            return _Value(_Kind.UNIFORM, self.number(str(value.dtype), one))
        return _replicated(value.shape, self.number(str(value.dtype), value.shape, data), "an array of constants")


def _mixed(value: _Value, cause: str, moves: bool = True) -> _Value:
    """Describes a value after an operation that may move its elements."""
    return replace(value, kind=_Kind.MIXED, cause=cause) if moves and value.kind is _Kind.ALIGNED else value


def _replicated(shape: tuple[int, ...], number: int, cause: str) -> _Value:
    """Describes an array that is equal on all ranks."""
    return _Value(_Kind.UNIFORM, number) if math.prod(shape) <= 1 else _Value(_Kind.POSITIONAL, number, cause)


def _computations(
    optimizer: optax.GradientTransformation, params: Any, state: Any, extra_args: Any, expressions: _Expressions
) -> list[tuple[str, Any]]:
    """The expression of each output of an element-wise optimizer, for parameters or for shards of them."""
    leaves = jax.tree.map_with_path(lambda path, leaf: StateLeaf(path_name(path), leaf.shape, leaf.dtype), params)
    shapes = {leaf.param: leaf.shape for leaf in jax.tree.leaves(leaves)}
    state = jax.tree.map(lambda leaf: replace(leaf, shape=shapes.get(leaf.param, leaf.shape)), state)
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (leaves, state, leaves))

    update = optax.with_extra_args_support(optimizer).update
    traced, results = jax.make_jaxpr(
        lambda grads, state, params, extra: (optimizer.init(params), *update(grads, state, params, **extra)),
        return_shape=True,
    )(*arguments, extra_args)
    inputs: list[_Value] = []
    for var, leaf in itertools.zip_longest(traced.jaxpr.invars, jax.tree.leaves((leaves, state, leaves))):
        number = expressions.number("input", len(inputs))
        held = _replicated(var.aval.shape, number, "an array that is no parameter's")
        inputs.append(_Value(_Kind.ALIGNED, number) if leaf and leaf.param is not None else held)
    found, values = [], iter(expressions.follow(traced, inputs))
    for what, like, result in zip(("first state", "update of", "state"), (state, leaves, state), results, strict=True):
        shapes_given = _shapes(_same_structure(result, like))
        for (path, leaf), shape in zip(jax.tree.leaves_with_path(like), shapes_given, strict=True):
            label, value = f"its {what} {path_name(path)!r}", next(values)
            if value.kind not in (_Kind.UNIFORM, _Kind.POSITIONAL if leaf.param is None else _Kind.ALIGNED):
                cause = value.cause or "elements of a parameter that it does not mirror"
                clip = "; if it clips, jaxddp.clip_by_global_norm does so on shards" if "(reduce_sum)" in cause else ""
                raise ValueError(_REFUSAL.format(f"{label} depends on {cause}") + clip)
            found.append((label, (value.number, shape == leaf.shape)))
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


def _abstract(params: Any) -> Any:
    return jax.eval_shape(lambda tree: tree, params)


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(tree)]


def _flat(params: Any, size: Callable[[Any], int]) -> Any:
    """Makes up shards of given sizes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1,) * (leaf.ndim - 1) + (size(leaf),), leaf.dtype), params)
