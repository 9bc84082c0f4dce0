"""What is gathered together: ``layer`` marks it, and a traced loss function is run with its parameters in shards.

A unit is a part of a model, such as a layer, that uses its parameters and then needs them no more. The loss function
is traced once on whole shapes, and its operations are carried out one by one: parameters stand as shards until an
operation needs them. A marked unit gets its own gathered for as long as it runs; what is used outside of any unit is
gathered before the first operation.

    y = unit(gather(shards), x)          gather: one all-gather      its transpose: one reduce-scatter
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax
from jax.extend import core

from .gather import Shard
from .ordering import Links
from .remat import CHECKPOINTS, WRAPPERS, Gather, bind, run_unit

_MARK = "jaxddp_layer"
_marking: ContextVar[bool] = ContextVar("jaxddp_marking", default=False)


def layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as one unit of a model, whose parameters ``zero3`` gathers, uses and drops.

    It may be called in a loop over layers or in the body of ``lax.scan`` over a stack of them. Other strategies, and
    calls outside of a trainer, run ``fn`` as it is. It needs no ``jax.checkpoint``: around a unit that gathers once
    more. Inside of ``lax.cond``, ``lax.switch`` and ``lax.while_loop`` (a ``fori_loop`` is one) it marks nothing, with
    a warning: what these take is gathered before them, all of it at once.

    Args:
        fn: ``(layer_params, *args)``, all trees of arrays, ``->`` a tree of arrays. Parameters of the model must come
            in as arguments, as they are or sliced from a stack; those that it closes over are gathered by themselves.

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

    @functools.wraps(fn)
    def unit(*args: Any, **kwargs: Any) -> Any:
        if not _marking.get():
            return fn(*args, **kwargs)
        leaves: list[Any]
        structure: Any
        leaves, structure = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array | jax.core.Tracer) for leaf in leaves]

        def jaxddp_layer(arrays: list[Any]) -> Any:
            traced = iter(arrays)
            args, kwargs = structure.unflatten(
                next(traced) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)
            )
            return fn(*args, **kwargs)

        assert jaxddp_layer.__name__ == _MARK
        return jax.jit(jaxddp_layer)([leaf for leaf, array in zip(leaves, is_array, strict=True) if array])

    return unit


def trace_marked(function: Callable[..., Any], *args: Any) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a function in which ``layer`` leaves its marks.

    Args:
        function: Of arrays.
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
    """Runs a program of which some arguments are shards.

    Args:
        program: From ``trace_marked``.
        args: One for each input; a ``Shard`` where the program expects the whole.
        gather: Shards ``->`` wholes, in one collective for each dtype.

    Returns:
        Its results.
    """
    loose = [place for place, arg in enumerate(args) if isinstance(arg, Shard) and _is_loose(program.jaxpr, place)]
    wholes = gather([args[place] for place in loose]) if loose else ()  # type: ignore[misc]
    known = dict(zip(loose, wholes, strict=True))
    last = max((i for i, equation in enumerate(program.jaxpr.eqns) if _has_unit(equation)), default=-1)
    return _Run(gather).jaxpr(
        program.jaxpr, program.consts, [known.get(place, arg) for place, arg in enumerate(args)], last
    )


class _Run:
    """Carries out the operations of a program."""

    def __init__(self, gather: Gather) -> None:
        self.gather = gather
        self.links = Links()

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], last: int = -1) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for place, equation in enumerate(jaxpr.eqns):
            inputs = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in equation.invars]
            values.update(zip(equation.outvars, self.equation(jaxpr, equation, inputs, place == last), strict=True))
        return [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in jaxpr.outvars]

    def equation(self, jaxpr: Any, equation: Any, inputs: list[Any], is_last: bool) -> Sequence[Any]:
        if equation.primitive.name in ("cond", "while") and _has_unit(equation):
            where = f"lax.{equation.primitive.name}"
            warnings.warn(f"jaxddp.layer marks nothing inside of {where}: all is gathered before it", stacklevel=2)
        if not any(isinstance(value, Shard) for value in inputs):
            return bind(jaxpr, equation, inputs)
        if _is_unit(equation):
            return self.unit(equation.params["jaxpr"], inputs, keep=is_last)
        if (taken := _rows(equation, inputs)) is not None:
            return [taken]
        if equation.primitive.name == "scan":
            return self.scan(equation, inputs)
        if equation.primitive.name in WRAPPERS:
            return self.wrapper(equation, inputs)
        return bind(jaxpr, equation, self.wholes(inputs))

    def unit(self, program: core.ClosedJaxpr, inputs: list[Any], *, keep: bool) -> Sequence[Any]:
        places = [place for place, value in enumerate(inputs) if isinstance(value, Shard)]
        shards, waited = self.links.before([inputs[place].local for place in places])
        linked = dict(zip(places, shards, strict=True))
        inputs = [value.of(linked[place]) if place in linked else value for place, value in enumerate(inputs)]
        return self.links.after(run_unit(program, inputs, self.gather, keep=keep), waited)

    def scan(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        params = equation.params
        body = params["jaxpr"]
        num_consts, num_carry = _consts_and_carry(equation)
        inputs = [*self.wholes(inputs[: num_consts + num_carry]), *inputs[num_consts + num_carry :]]
        consts, carry, xs = (
            inputs[:num_consts],
            inputs[num_consts : num_consts + num_carry],
            inputs[num_consts + num_carry :],
        )
        xs = [x if not isinstance(x, Shard) or x.cut.by_row else self.wholes([x])[0] for x in xs]

        def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            slices = [
                x.rows(row, x.cut.shape[1:]) if isinstance(x, Shard) else row for x, row in zip(xs, rows, strict=True)
            ]
            # The rounds of a loop are in line by themselves, and its values cannot be linked to those outside.
            results = _Run(self.gather).jaxpr(body.jaxpr, body.consts, [*consts, *carry, *slices])
            return results[:num_carry], results[num_carry:]

        locals_ = [x.local if isinstance(x, Shard) else x for x in xs]
        carry, ys = lax.scan(
            step, list(carry), locals_, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        self.links = Links()
        return [*carry, *ys]

    def wrapper(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        inner = equation.params["jaxpr"]
        jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())
        if equation.primitive.name not in CHECKPOINTS:
            return self.jaxpr(jaxpr, consts, inputs)

        def compute(arrays: list[Any]) -> list[Any]:
            pairs = zip(inputs, arrays, strict=True)
            return _Run(self.gather).jaxpr(
                jaxpr, consts, [x.of(array) if isinstance(x, Shard) else array for x, array in pairs]
            )

        arrays = [value.local if isinstance(value, Shard) else value for value in inputs]
        options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        return jax.checkpoint(compute, **options)(arrays)

    def wholes(self, values: list[Any]) -> list[Any]:
        """Gathers what is left of shards, where an operation needs the whole."""
        shards = [value for value in values if isinstance(value, Shard)]
        found = iter(self.gather(shards)) if shards else iter(())
        return [next(found) if isinstance(value, Shard) else value for value in values]


def _is_unit(equation: Any) -> bool:
    return equation.primitive.name in ("jit", "pjit") and equation.params.get("name") == _MARK


def _has_unit(equation: Any) -> bool:
    return _is_unit(equation) or any(
        _has_unit(inner) for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns
    )


def _is_loose(jaxpr: Any, place: int) -> bool:
    """Whether an input is used by anything but units and what leads to them."""
    followed = {jaxpr.invars[place]}
    for equation in jaxpr.eqns:
        places = [
            i for i, atom in enumerate(equation.invars) if not isinstance(atom, core.Literal) and atom in followed
        ]
        if not places or _is_unit(equation):
            continue
        if _takes_rows(equation):
            followed.update(equation.outvars)
        elif equation.primitive.name == "scan":
            first = sum(_consts_and_carry(equation))
            if any(i < first or _is_loose(equation.params["jaxpr"].jaxpr, i) for i in places):
                return True
        elif equation.primitive.name in WRAPPERS:
            inner = equation.params["jaxpr"]
            if any(_is_loose(getattr(inner, "jaxpr", inner), i) for i in places):
                return True
        else:
            return True
    return any(not isinstance(atom, core.Literal) and atom in followed for atom in jaxpr.outvars)


def _consts_and_carry(scan: Any) -> tuple[int, int]:
    """How many of a loop's first inputs are the same in all rounds, and how many go from round to round."""
    params = scan.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)


def _takes_rows(equation: Any) -> bool:
    """Whether an operation takes entries of dimension 0 and leaves the others whole."""
    name, params = equation.primitive.name, equation.params
    whole = equation.invars[0].aval.shape if equation.invars else ()
    if name == "slice":
        return params["strides"] is None and equation.outvars[0].aval.shape[1:] == whole[1:]
    if name == "dynamic_slice":
        return equation.outvars[0].aval.shape[1:] == whole[1:]
    return name == "squeeze" and params["dimensions"] == (0,)


def _rows(equation: Any, inputs: list[Any]) -> Shard | None:
    """The shard of the rows that an operation takes of a shard; None if it does something else."""
    shard = inputs[0]
    if not isinstance(shard, Shard) or not shard.cut.by_row or not _takes_rows(equation):
        return None
    shape = equation.outvars[0].aval.shape
    if equation.primitive.name == "slice":
        return shard.rows(shard.local[equation.params["start_indices"][0] : equation.params["limit_indices"][0]], shape)
    if equation.primitive.name == "dynamic_slice":
        return shard.rows(lax.dynamic_slice_in_dim(shard.local, inputs[1], shape[0]), shape)
    return shard.rows(shard.local[0], shape)
