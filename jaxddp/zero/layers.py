"""Units: ``layer`` marks one, and the loss function runs on shards that units gather.

A unit is a part of a model, such as a layer, whose parameters need to be full only while it runs. The loss function is
traced once on full shapes, and the trace is evaluated operation by operation: a parameter stays a shard until a unit
gathers it. Parameters used outside of units are gathered first.

Why an interpreter? A shorter way is to register shards as pytrees, call the loss on them, and let ``layer`` gather its
arguments. For most of 35 loss functions this gives the same gradients, and for the models of ``stage3_target_test.py``
the same collectives (with the last unit kept by hand) and temporaries on h100:8. It fails for others:

    loss function                                             called on shards
    --------------------------------------------------------  ---------------------------------------------------
    a penalty over ``jax.tree.leaves(params)``, a norm, ...   wrong gradients, silently: the leaves are shards
    leaves' sizes, a ``jax.grad`` in the loss                 wrong even if a trace first finds what to gather
    ``jnp.einsum`` or ``lax`` on a parameter, a Linen module  ValueError; shapes are refused
    ``x[i, :, :]`` on the rows of a stack, in a tree map      IndexError
    16 units in a ``jax.jit`` each, h100:8                    56.0 MiB of temporaries instead of 31.1: nothing orders
                                                              units of different traces
    16 units of ``w + a @ b``, h100:8                         87.2 MiB instead of 30.3: a policy sees operations, not
                                                              that these depend on parameters alone

Finding out what to gather first needs the trace and its analysis anyway, so only the evaluation (``_Rules``) would be
saved.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.extend import core

from ..arguments import check_function
from ..interpreter import CALLS, CHECKPOINT, bind, called_program, interpret, num_consts_and_carry
from .gather import Gather, Shard
from .ordering import UnitOrder
from .remat import run_unit

_MARK = "jaxddp_layer"
_marking: ContextVar[bool] = ContextVar("jaxddp_marking", default=False)


def layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as one unit of a model, whose parameters ``zero3`` gathers, uses and drops.

    Call it in a loop over layers, or in the body of ``lax.scan`` over a stack of them. Other strategies, and calls
    outside of a trainer, run ``fn`` as it is. Do not add ``jax.checkpoint``: it would gather once more. Inside of
    ``lax.cond``, ``lax.switch`` and ``lax.while_loop`` (also ``fori_loop``) a unit is ignored with a warning, and the
    parameters used there are gathered before the forward.

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
        if not _marking.get():
            return fn(*args, **kwargs)

        def jaxddp_layer() -> Any:
            return fn(*args, **kwargs)

        assert jaxddp_layer.__name__ == _MARK
        return jax.jit(jaxddp_layer)()  # the arrays that it closes over are the operation's inputs

    return unit


def trace_marked(function: Callable[..., Any], *args: Any) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a function so that the calls of ``layer`` can be found in the trace.

    Args:
        function: A function of arrays.
        *args: Arrays or ``jax.ShapeDtypeStruct``.

    Returns:
        The traced program, and the shapes of its results.
    """
    token = _marking.set(True)
    try:
        return jax.make_jaxpr(function, return_shape=True)(*args)
    finally:
        _marking.reset(token)


def run(program: core.ClosedJaxpr, args: Sequence[jax.Array | Shard], gather: Gather) -> list[jax.Array]:
    """Runs a program on arguments of which some are shards.

    Args:
        program: From ``trace_marked``.
        args: One for each input; a ``Shard`` in place of a full parameter.
        gather: Shards ``->`` full parameters.

    Returns:
        The program's results.
    """
    args = list(args)
    early = [
        place
        for place, arg in enumerate(args)
        if isinstance(arg, Shard) and _is_used_outside(program.jaxpr, place, arg.cut.by_row)
    ]
    if early:
        for place, full in zip(early, gather([args[place] for place in early]), strict=True):  # type: ignore[misc]
            args[place] = full
    with_units = [equation for equation in program.jaxpr.eqns if _has_unit(equation)]
    return interpret(program, args, _Rules(gather, with_units[-1] if with_units else None))


class _Rules:
    """Evaluates operations on shards.

    An instance orders its units. A loop's body and a checkpoint have an instance of their own, because their values
    cannot depend on those outside.
    """

    def __init__(self, gather: Gather, last: Any = None) -> None:
        self.gather, self.last = gather, last
        self.order = UnitOrder()

    def __call__(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name in ("cond", "while") and _has_unit(equation):
            message = f"jaxddp.layer marks nothing inside of lax.{name}: all is gathered before it"
            warnings.warn(message, stacklevel=2)
        if not any(isinstance(value, Shard) for value in inputs):
            return bind(equation, inputs)
        if _is_unit(equation):
            return run_unit(equation.params["jaxpr"], inputs, self.gather, self.order, keep=equation is self.last)
        if name in CALLS:
            return interpret(called_program(equation), inputs, self)
        if name == CHECKPOINT:
            return self.checkpoint(equation, inputs)
        if name == "scan":
            return self.scan(equation, inputs)
        return [_rows(equation, inputs)]

    def checkpoint(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        def compute(arrays: list[Any]) -> list[Any]:
            pairs = zip(inputs, arrays, strict=True)
            values = [replace(value, local=array) if isinstance(value, Shard) else array for value, array in pairs]
            return interpret(called_program(equation), values, _Rules(self.gather))

        options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        arrays = [value.local if isinstance(value, Shard) else value for value in inputs]
        return jax.checkpoint(compute, **options)(arrays)

    def scan(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        num_consts, num_carry = num_consts_and_carry(equation)
        consts, carry, xs = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]

        def body(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            pairs = zip(xs, rows, strict=True)
            slices = [x.rows(row, x.shape[1:]) if isinstance(x, Shard) else row for x, row in pairs]
            results = interpret(called_program(equation), [*consts, *carry, *slices], _Rules(self.gather))
            return results[:num_carry], results[num_carry:]

        options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
        stacks = [x.local if isinstance(x, Shard) else x for x in xs]
        carry, ys = lax.scan(body, carry, stacks, **options)
        self.order = UnitOrder(self.order)  # units after a loop do not wait for those before it
        return [*carry, *ys]


def _is_unit(equation: Any) -> bool:
    return equation.primitive.name == "jit" and equation.params["name"] == _MARK


def _has_unit(equation: Any) -> bool:
    return _is_unit(equation) or any(
        _has_unit(inner) for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns
    )


def _is_used_outside(jaxpr: Any, place: int, by_row: bool) -> bool:
    """Whether anything but a unit uses an input or, if it is cut by row, rows of it."""
    followed = {jaxpr.invars[place]: by_row}
    for equation in jaxpr.eqns:
        for index, atom in enumerate(equation.invars):
            if isinstance(atom, core.Literal) or atom not in followed or _is_unit(equation):
                continue
            name, in_rows = equation.primitive.name, followed[atom]
            if in_rows and _takes_rows(equation):
                followed[equation.outvars[0]] = name != "squeeze"
            elif name in (*CALLS, CHECKPOINT):
                if _is_used_outside(called_program(equation).jaxpr, index, in_rows):
                    return True
            elif name == "scan" and in_rows and index >= sum(num_consts_and_carry(equation)):
                if _is_used_outside(called_program(equation).jaxpr, index, False):
                    return True
            else:
                return True
    return any(not isinstance(atom, core.Literal) and atom in followed for atom in jaxpr.outvars)


def _takes_rows(equation: Any) -> bool:
    """Whether an operation slices along dimension 0 only."""
    name, params = equation.primitive.name, equation.params
    if name == "squeeze":
        return params["dimensions"] == (0,)
    if name not in ("slice", "dynamic_slice") or params.get("strides") is not None:
        return False
    return equation.outvars[0].aval.shape[1:] == equation.invars[0].aval.shape[1:]


def _rows(equation: Any, inputs: list[Any]) -> Shard:
    """Evaluates an operation that slices along dimension 0."""
    shard, shape, params = inputs[0], equation.outvars[0].aval.shape, equation.params
    if equation.primitive.name == "squeeze":
        return shard.rows(shard.local[0], shape)
    if equation.primitive.name == "slice":
        return shard.rows(shard.local[params["start_indices"][0] : params["limit_indices"][0]], shape)
    return shard.rows(lax.dynamic_slice_in_dim(shard.local, inputs[1], shape[0]), shape)
