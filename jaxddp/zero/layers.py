"""Units of a model: what ``layer`` marks is gathered, used and dropped, and gathered again in the backward.

    forward    p = gather(shards)     y = unit(p, x)             drop p
    backward   p = gather(shards)     dx, dp = unit'(p, x, dy)   dp is reduce-scattered, the transpose of the gather

The loss function gets a ``Shard`` in place of each parameter that only units use; ``layer`` gathers those in its
arguments. What is used in any other way is gathered before the forward. Which is which is read off a trace of the loss
function on full parameters, in which every unit is one operation.

A unit is under ``jax.checkpoint``: results of matrix products are saved, everything else is computed again. The last
unit of a loss keeps what it gathered, since the backward begins there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core

from ..arguments import check_function
from ..interpreter import CALLS, CHECKPOINT, called_program, num_consts_and_carry
from ..strategy import Ranks
from .gather import Shard, gather
from .ordering import UnitOrder

_MARK = "jaxddp_layer"
_current: ContextVar[_Units | None] = ContextVar("jaxddp_units", default=None)


def layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as one unit of a model, whose parameters ``zero3`` gathers, uses and drops.

    Call it in a loop over layers, or in the body of ``lax.scan`` over a stack of them. Other strategies, and calls
    outside of a trainer, run ``fn`` as it is. A ``jax.checkpoint`` belongs inside, ``layer(jax.checkpoint(fn))``: then
    only the unit's inputs are saved. Around a unit it would gather once more. Inside of ``lax.cond``, ``lax.switch``
    and ``lax.while_loop`` nothing is marked: what is used there is gathered before the forward.

    Args:
        fn: ``(layer_params, *args)``, all trees of arrays, ``->`` a tree of arrays. Pass the model's parameters
            unchanged, or rows of a stack of them.

    Returns:
        A function like ``fn``.

    Example:
        >>> import jax.numpy as jnp
        >>> dense = layer(lambda params, x: jnp.tanh(x @ params["kernel"]))
        >>> def loss_fn(params, batch):
        ...     x = batch["x"]
        ...     for one in params["layers"]:
        ...         x = dense(one, x)
        ...     return jnp.mean((x - batch["y"]) ** 2)
    """
    check_function("fn", fn)

    @functools.wraps(fn)
    def unit(*args: Any, **kwargs: Any) -> Any:
        units = _current.get()
        return fn(*args, **kwargs) if units is None else units.run(fn, args, kwargs)

    return unit


class Uses(NamedTuple):
    """How a loss function uses its parameters.

    Attributes:
        outside: For each leaf, whether anything but a unit uses it.
        unused: For each leaf, whether nothing at all does.
        num_units: Units that the loss itself runs, not those in loops.
        ends_with_unit: Whether the last of them comes after all loops.
    """

    outside: list[bool]
    unused: list[bool]
    num_units: int
    ends_with_unit: bool


def trace_uses(loss: Callable[..., Any], params: Any, has_rows: Sequence[bool], *inputs: Any) -> Uses:
    """Traces a loss function of full parameters.

    Args:
        loss: ``(params, *inputs)``.
        params: A tree of ``jax.ShapeDtypeStruct``.
        has_rows: For each leaf, whether rows of it may be taken from its shard.
        *inputs: Arrays.
    """
    token = _current.set(_Units(None))
    try:
        jaxpr = jax.make_jaxpr(loss)(params, *inputs).jaxpr
    finally:
        _current.reset(token)
    is_differentiated = _is_differentiated(jaxpr)
    outside = [is_differentiated or _is_used_outside(jaxpr, at, rows) for at, rows in enumerate(has_rows)]
    read = {atom for one in jaxpr.eqns for atom in one.invars if not isinstance(atom, core.Literal)}
    read |= {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    unused = [var not in read for var in jaxpr.invars[: len(has_rows)]]
    holding = [equation for equation in jaxpr.eqns if _has_unit(equation)]
    return Uses(outside, unused, sum(map(_is_unit, holding)), bool(holding) and _is_unit(holding[-1]))


def run_units(function: Callable[..., Any], ranks: Ranks, uses: Uses) -> Callable[..., Any]:
    """Makes a function run its units on the shards that it is given."""

    def run(*args: Any) -> Any:
        token = _current.set(_Units(ranks, uses.num_units if uses.ends_with_unit else None))
        try:
            return function(*args)
        finally:
            _current.reset(token)

    return run


class _Units:
    """The units that run in one trace of a loss function; without ranks, they are only marked in the trace."""

    def __init__(self, ranks: Ranks | None, last: int | None = None) -> None:
        self.ranks, self.last = ranks, last
        self._level, self._count = core.get_opaque_trace_state(), 0
        self._orders: list[tuple[Any, UnitOrder]] = []  # by trace: values of a loop cannot depend on those outside

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if (ranks := self.ranks) is None:
            return self._marked(fn, args, kwargs)
        here = core.get_opaque_trace_state()
        self._count += here == self._level
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Shard))
        shards = [leaf for leaf in leaves if isinstance(leaf, Shard)]
        if not shards:
            return fn(*args, **kwargs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def compute(local: list[jax.Array], arrays: list[jax.Array]) -> Any:
            full = gather([Shard(array, shard.held) for shard, array in zip(shards, local, strict=True)], ranks)
            full, arrays = _tie_gradients(full, arrays)
            values, params = list(leaves), iter(full)
            for place, array in zip(places, arrays, strict=True):
                values[place] = array
            values = [next(params) if isinstance(value, Shard) else value for value in values]
            args, kwargs = jax.tree.unflatten(structure, values)
            return fn(*args, **kwargs)

        if not (here == self._level and self._count == self.last):
            compute = jax.checkpoint(compute, policy=jax.checkpoint_policies.dots_saveable)
        order = self._order(here)
        local, token = order.before([shard.local for shard in shards])
        results, structure = jax.tree.flatten(compute(list(local), [leaves[place] for place in places]))
        return jax.tree.unflatten(structure, order.after(results, token))

    def _order(self, here: Any) -> UnitOrder:
        for state, order in self._orders:
            if state == here:
                return order
        self._orders.append((here, UnitOrder()))
        return self._orders[-1][1]

    def _marked(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit as one operation of the trace."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def jaxddp_layer(arrays: list[jax.Array]) -> Any:
            values = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                values[place] = _undifferentiated(array)
            args, kwargs = jax.tree.unflatten(structure, values)
            return fn(*args, **kwargs)

        # The name says how many arguments there are; what the unit closes over are further inputs, before them.
        jaxddp_layer.__name__ = f"{_MARK}_{len(places)}"
        return jax.jit(jaxddp_layer)([leaves[place] for place in places])


@jax.custom_jvp
def _undifferentiated(array: jax.Array) -> jax.Array:
    """The identity, which is gone from a trace once a derivative is taken of it."""
    return array


@_undifferentiated.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0]


def _is_unit(equation: Any) -> bool:
    return equation.primitive.name == "jit" and equation.params["name"].startswith(_MARK)


def _has_unit(equation: Any) -> bool:
    return _is_unit(equation) or any(
        _has_unit(inner) for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns
    )


def _is_differentiated(jaxpr: Any) -> bool:
    """Whether a loss takes derivatives of its own of a unit: those of a shard would be sums over ranks."""
    for equation in jaxpr.eqns:
        inside = [*core.jaxprs_in_params(equation.params)]
        if _is_unit(equation):
            kept = [one for inner in inside for one in inner.eqns if one.primitive.name == "custom_jvp_call"]
            if sum(not one.params["call_jaxpr"].eqns for one in kept) < _num_arguments(equation):
                return True
        if any(map(_is_differentiated, inside)):
            return True
    return False


def _is_used_outside(jaxpr: Any, place: int, has_rows: bool) -> bool:
    """Whether anything but a unit's arguments uses an input or, if it has rows, rows of it."""
    followed = {jaxpr.invars[place]: has_rows}
    for equation in jaxpr.eqns:
        for index, atom in enumerate(equation.invars):
            if isinstance(atom, core.Literal) or atom not in followed or _is_argument(equation, index):
                continue
            name, in_rows = equation.primitive.name, followed[atom]
            if in_rows and index == 0 and _takes_rows(equation):
                followed[equation.outvars[0]] = name != "squeeze"
            elif name in (*CALLS, CHECKPOINT) and not _is_unit(equation):
                if _is_used_outside(called_program(equation).jaxpr, index, in_rows):
                    return True
            elif name == "scan" and in_rows and index >= sum(num_consts_and_carry(equation)):
                if _is_used_outside(called_program(equation).jaxpr, index, False):
                    return True
            else:
                return True
    return any(not isinstance(atom, core.Literal) and atom in followed for atom in jaxpr.outvars)


def _is_argument(equation: Any, index: int) -> bool:
    """Whether an input of a unit is one of its arguments, and nothing that it closes over."""
    return _is_unit(equation) and index >= len(equation.invars) - _num_arguments(equation)


def _num_arguments(unit: Any) -> int:
    return int(unit.params["name"].rpartition("_")[2])


def _takes_rows(equation: Any) -> bool:
    """Whether an operation slices along dimension 0 only."""
    name, params = equation.primitive.name, equation.params
    if name == "squeeze":
        return params["dimensions"] == (0,)
    if name not in ("slice", "dynamic_slice") or params.get("strides") is not None:
        return False
    return equation.outvars[0].aval.shape[1:] == equation.invars[0].aval.shape[1:]


def _tie_gradients(full: list[jax.Array], others: list[Any]) -> tuple[list[jax.Array], list[Any]]:
    """The identity; in the backward, no gradient of a unit's inputs is used before all of them are computed.

    Otherwise XLA computes the gradients of activations first, for all units, and keeps alive what the gradients of
    parameters still need. Inputs without a gradient, such as a batch, stay out of the barrier: it would make JAX
    compute their gradients, and gather parameters for that.
    """

    @jax.custom_vjp
    def identity(arrays: list[Any]) -> list[Any]:
        return arrays

    def forward(arrays: list[Any]) -> tuple[list[Any], list[tuple[()] | None]]:
        # Which inputs want a gradient, as () or None: JAX treats both as structure, where a bool would be an array.
        return [array.value for array in arrays], [() if array.perturbed else None for array in arrays]

    def backward(wanted: list[tuple[()] | None], grads: list[Any]) -> tuple[list[Any]]:
        grads = [
            None if wants is None or isinstance(grad, jax.custom_derivatives.SymbolicZero) else grad
            for wants, grad in zip(wanted, grads, strict=True)
        ]
        return (lax.optimization_barrier(grads),)

    identity.defvjp(forward, backward, symbolic_zeros=True)
    passed = identity([*full, *others])
    return passed[: len(full)], passed[len(full) :]
