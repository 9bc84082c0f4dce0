"""Units of a model: what ``layer`` marks is gathered, used and dropped, and gathered again in the backward.

    forward    p = gather(shards)     y = unit(p, x)             drop p
    backward   p = gather(shards)     dx, dp = unit'(p, x, dy)   dp is reduce-scattered, the transpose of the gather

The loss is traced once, on full parameters: whatever it asks of them, such as a size, is right. In the trace every
unit is one operation. Run on shards, units gather theirs, rows of a stack and loops over rows are those of shards, and
everything else is what it was in the trace: what it uses has been gathered before the forward.

A unit is under ``jax.checkpoint`` (``computed_again``): results of matrix products are saved, everything else is
computed again; if there is a checkpoint of the user's in it, what that one saves. The last unit of a loss, or of a
checkpoint around it, keeps what it gathered, since the backward begins there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ..arguments import check_function
from ..interpreter import CALLS, CHECKPOINT, bind, called_program, interpret, num_consts_and_carry
from ..strategy import Ranks
from .gather import Shard, gather, put
from .ordering import Order, after_loop, computed_again, in_order

_is_marking: ContextVar[bool] = ContextVar("jaxddp_is_marking", default=False)


def layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as one unit of a model, whose parameters ``zero3`` gathers, uses and drops.

    Call it in a loop over layers, or in the body of ``lax.scan`` over a stack of them. Other strategies, and calls
    outside of a trainer, run ``fn`` as it is. With ``jax.checkpoint``, inside or around, only the unit's inputs are
    saved. Inside of ``lax.cond``, ``lax.switch`` and ``lax.while_loop`` nothing is marked: what is used there is
    gathered before the forward.

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
        if not _is_marking.get():
            return fn(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def jaxddp_layer(arrays: list[jax.Array]) -> Any:
            args, kwargs = jax.tree.unflatten(structure, put(leaves, places, arrays))
            return fn(*args, **kwargs)

        return jax.jit(jaxddp_layer)([leaves[place] for place in places])

    return unit


def trace_marked(loss: Callable[..., Any], *args: Any) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a loss function of full parameters; gives the program and describes its result."""
    token = _is_marking.set(True)
    try:
        return jax.make_jaxpr(loss, return_shape=True)(*args)
    finally:
        _is_marking.reset(token)


def used_outside(jaxpr: Any, stacked: Sequence[int | None]) -> set[int]:
    """Finds the parameters that are used by anything but units, or have rows that are.

    Args:
        jaxpr: Of a marked program.
        stacked: For each input, in how many leading dimensions it is a stack of shards; None if it is no shard.

    Returns:
        Their places among the inputs.
    """
    pairs = zip(jaxpr.invars, enumerate(stacked), strict=True)
    followed = {var: (place, dims) for var, (place, dims) in pairs if dims is not None}
    outside: set[int] = set()
    for equation in jaxpr.eqns:
        uses, name = _of(followed, equation.invars), equation.primitive.name
        if not uses or _is_unit(equation):
            continue
        if _takes_rows(equation) and [*uses] == [0] and uses[0][1]:
            place, dims = uses[0]
            followed[equation.outvars[0]] = place, dims - (name == "squeeze")
            continue
        shards = {}
        if name in (*CALLS, CHECKPOINT):
            shards = {at: dims for at, (_, dims) in uses.items()}
        elif name == "scan":
            first = sum(num_consts_and_carry(equation))
            shards = {at: dims - 1 for at, (_, dims) in uses.items() if at >= first and dims}
        inner = [shards.get(at) for at in range(len(equation.invars))]
        of_inner = used_outside(called_program(equation).jaxpr, inner) if shards else set()
        outside |= {place for at, (place, _) in uses.items() if at not in shards or at in of_inner}
    return outside | {place for place, _ in _of(followed, jaxpr.outvars).values()}


def run_units(
    program: core.ClosedJaxpr, inputs: Sequence[Any], ranks: Ranks, *,
    is_end: bool, in_loop: bool = False, order: Order | None = None,
) -> list[Any]:  # fmt: skip
    """Runs a marked program, some of whose inputs are shards that only units use.

    Args:
        program: From ``trace_marked``, or one in it.
        inputs: Arrays, and ``Shard`` in place of some.
        ranks: The ranks.
        is_end: Whether the backward begins with it.
        in_loop: Whether forward and backward are loops, between which XLA finds no equal operations. Else barriers keep
            it from using what the forward has gathered; in a loop they would tie each gather to the round before.
        order: Of the units before it; None if there are none whose values can be used here, as in a loop.

    Returns:
        Its results.
    """
    order = Order() if order is None else order
    last = next((equation for equation in reversed(program.jaxpr.eqns) if _has_unit(equation)), None)

    def rule(equation: Any, inputs: list[Any]) -> Sequence[Any]:
        places = [place for place, one in enumerate(inputs) if isinstance(one, Shard)]
        if not places:
            return bind(equation, inputs)
        if _takes_rows(equation):
            return [_rows(equation, inputs)]
        name, params, inner = equation.primitive.name, equation.params, called_program(equation)
        if name == "scan":
            carry, results = _run_scan(equation, inputs, ranks)
            # Gradients of the stacked results may be known to be zeros, and behind a barrier no longer are.
            return [*after_loop(order, carry), *results]
        keeps, is_unit = is_end and equation is last, _is_unit(equation)
        if name in CALLS and not is_unit:
            return run_units(inner, inputs, ranks, is_end=keeps, in_loop=in_loop, order=order)
        shards = [inputs[place] for place in places]
        others = [place for place, one in enumerate(inputs) if isinstance(one, jax.Array)]
        # Its gradients are scattered while those of its results are computed, so they do not wait for these.
        follows_loop = order.of_loop is not None

        def compute(local: list[jax.Array], arrays: list[jax.Array]) -> list[Any]:
            own: Any = [shard._replace(local=array) for shard, array in zip(shards, local, strict=True)]
            if not is_unit:
                return run_units(inner, put(put(inputs, places, own), others, arrays), ranks, is_end=True)
            own, arrays = (gather(own, ranks)[0], arrays) if follows_loop else gather(own, ranks, arrays)
            return core.jaxpr_as_fun(inner)(*put(put(inputs, places, own), others, arrays))

        if not is_unit:
            compute = jax.checkpoint(compute, policy=params["policy"], prevent_cse=params["prevent_cse"])
        elif in_loop and not keeps:
            compute = jax.checkpoint(compute, policy=_policy(inner), prevent_cse=False)
        is_again = is_unit and not keeps and not in_loop
        unit = computed_again(compute, _policy(inner)) if is_again else lambda *args: (compute(*args), None)
        arrays = [inputs[place] for place in others]
        return in_order(order, lambda local: unit(local, arrays), [shard.local for shard in shards])

    return interpret(program, inputs, rule)


def _policy(unit: core.ClosedJaxpr) -> Callable[..., Any] | None:
    """What a unit keeps for the backward: what a checkpoint in it says, else the results of its products.

    The checkpoint around a unit would otherwise keep products inside of the user's, whose policy it does not ask.
    """
    given = (one.params["policy"] for one in unit.jaxpr.eqns if one.primitive.name == CHECKPOINT)
    return next(given, jax.checkpoint_policies.dots_saveable)


def _run_scan(equation: Any, inputs: list[Any], ranks: Ranks) -> tuple[list[Any], list[Any]]:
    """Runs a loop over rows of shards; gives what the last round hands on, and the stacked results."""
    program, params = called_program(equation), equation.params
    num_consts, num_carry = num_consts_and_carry(equation)
    consts, init, stacks = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]
    shapes = [var.aval.shape for var in program.jaxpr.invars[num_consts + num_carry :]]

    places = [place for place, stack in enumerate(stacks) if isinstance(stack, Shard)]
    dtypes = [stacks[place].local.dtype for place in places]
    # Along other axes, gradients of one row would have to lie alike.
    has_row = len({*dtypes}) == 1 and jnp.issubdtype(dtypes[0], jnp.floating) and not ranks.other_axes

    def body(carry: list[Any], given: tuple[list[jax.Array], jax.Array | None]) -> tuple[list[Any], list[Any]]:
        local, row = given
        if row is not None:
            local = put(local, places, _gradients_to_row([local[place] for place in places], row))
        rows = [
            stack.rows(array, shape) if isinstance(stack, Shard) else array
            for stack, array, shape in zip(stacks, local, shapes, strict=True)
        ]
        is_loop = params["length"] > params["unroll"]  # else XLA makes none of it
        results = run_units(program, [*consts, *carry, *rows], ranks, is_end=False, in_loop=is_loop)
        return results[:num_carry], results[num_carry:]

    local = [stack.local if isinstance(stack, Shard) else stack for stack in stacks]
    row = None
    if has_row:
        held = [local[place] for place in places]
        row = _gradients_from_rows(tuple(one.shape for one in held), held)
        local = put(local, places, lax.stop_gradient(held))
    carry, results = lax.scan(body, init, (local, row), params["length"], params["reverse"], params["unroll"])
    return carry, results


# The gradients of a round's shards are one row of one stack, zeros before the backward: then XLA scatters them while
# the next round computes, which it does not where a scatter's result is divided among several stacks or, on TPUs, where
# its parts are reshaped to one dimension before they are joined again.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients_from_rows(shapes: tuple[tuple[int, ...], ...], stacks: list[jax.Array]) -> jax.Array:
    """Zeros ``[rounds, elements]``, whose gradients become those of stacks of these shapes, ``[rounds, ...]``."""
    return jnp.zeros((shapes[0][0], sum(math.prod(shape[1:]) for shape in shapes)), stacks[0].dtype)


def _from_rows(shapes: tuple[tuple[int, ...], ...], _: None, rows: jax.Array) -> tuple[list[jax.Array]]:
    ends = list(itertools.accumulate(math.prod(shape[1:]) for shape in shapes))
    parts = jnp.split(rows, ends[:-1], axis=1)
    return ([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)],)


_gradients_from_rows.defvjp(lambda shapes, stacks: (_gradients_from_rows(shapes, stacks), None), _from_rows)


@jax.custom_vjp
def _gradients_to_row(arrays: list[jax.Array], row: jax.Array) -> list[jax.Array]:
    """The arrays, whose gradients become that of the row."""
    del row
    return arrays


_gradients_to_row.defvjp(
    lambda arrays, row: (arrays, None),
    lambda _, grads: (None, jnp.concatenate([grad.reshape(1, -1) for grad in grads], axis=1)[0]),
)


def _rows(equation: Any, inputs: list[Any]) -> Shard:
    """The rows of a stack that an operation takes."""
    stack, shape, params = inputs[0], equation.outvars[0].aval.shape, equation.params
    match equation.primitive.name:
        case "squeeze":
            local = stack.local[0]
        case "slice":
            local = stack.local[params["start_indices"][0] : params["limit_indices"][0]]
        case _:
            local = lax.dynamic_slice_in_dim(stack.local, inputs[1], shape[0])
    return stack.rows(local, shape)


def _takes_rows(equation: Any) -> bool:
    """Whether an operation slices along dimension 0 only."""
    name, params = equation.primitive.name, equation.params
    if name == "squeeze":
        return params["dimensions"] == (0,)
    if name not in ("slice", "dynamic_slice") or params.get("strides") is not None:
        return False
    return equation.outvars[0].aval.shape[1:] == equation.invars[0].aval.shape[1:]


def _is_unit(equation: Any) -> bool:
    return equation.primitive.name == "jit" and equation.params["name"] == "jaxddp_layer"


def _has_unit(equation: Any) -> bool:
    return _is_unit(equation) or any(
        _has_unit(inner) for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns
    )


def _of(found: dict[Any, Any], atoms: Sequence[Any]) -> dict[int, Any]:
    """What is found of some atoms of a jaxpr, by place."""
    return {at: found[one] for at, one in enumerate(atoms) if not isinstance(one, core.Literal) and one in found}
