"""The order in which a traced backward pass finishes the gradients.

Buckets fill in this order. In the tree's order (Flax sorts parameters by name, dictionaries give ``l1, l10, l2``)
buckets would wait for gradients from both ends of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from jax.extend import core

# Operations that wrap a program, which is followed. A loop is one operation: its results are ready when it ends.
TRANSPARENT = {"jit", "pjit", "shard_map", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
# Operations without inputs or effects that may give every rank another value.
_HOST_VALUES = {"pure_callback", "ffi_call"}


def finishing_times(closed: core.ClosedJaxpr, cost: Callable[[Any], float] = lambda equation: 1) -> list[float | None]:
    """Finds when each output of a traced program is ready.

    Args:
        closed: What ``jax.make_jaxpr`` returns.
        cost: Duration of an operation.

    Returns:
        For each output the end of the operation that computes it; None if it depends on no input, nor on
        the rank or the host, so is constant.
    """
    inputs = [0.0] * len(closed.jaxpr.invars)
    return _walk(closed.jaxpr, inputs, [0.0], cost)


def matmul_flops(equation: Any) -> float:
    """FLOPs of the matrix products of one traced operation, those of a loop times its length."""
    if equation.primitive.name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        length = math.prod(equation.invars[0].aval.shape[dim] for dim in contracting)
        return 2.0 * equation.outvars[0].aval.size * length
    trips = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
    return trips * sum(matmul_flops(inner) for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns)


def _walk(
    jaxpr: Any, inputs: Iterable[float | None], clock: list[float], cost: Callable[[Any], float]
) -> list[float | None]:
    ready: dict[Any, float | None] = dict(zip(jaxpr.invars, inputs, strict=True))
    ready.update((var, None) for var in jaxpr.constvars)

    def when(atom: Any) -> float | None:
        return None if isinstance(atom, core.Literal) else ready[atom]

    for equation in jaxpr.eqns:
        arguments = [when(atom) for atom in equation.invars]
        inner = _wrapped(equation)
        if inner is not None and len(inner.invars) == len(arguments):
            times = _walk(inner, arguments, clock, cost)
        else:
            clock[0] += cost(equation)
            constant = all(time is None for time in arguments) and not _may_differ_by_rank(equation)
            times = [None if constant else clock[0]] * len(equation.outvars)
        ready.update(zip(equation.outvars, times, strict=True))
    return [when(atom) for atom in jaxpr.outvars]


def _may_differ_by_rank(equation: Any) -> bool:
    """Whether an operation of constants, or one in its loop or branch, reads the rank or the host."""
    # Reading the rank, collectives and io_callback are effects, which loops and branches inherit.
    if equation.effects or equation.primitive.name in _HOST_VALUES:
        return True
    return any(_may_differ_by_rank(inner) for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns)


def _wrapped(equation: Any) -> Any:
    if equation.primitive.name not in TRANSPARENT:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in equation.params:
            return getattr(equation.params[key], "jaxpr", equation.params[key])
    return None
