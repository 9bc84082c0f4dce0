"""The order in which a traced backward pass finishes the gradients.

Buckets fill in this order. The order of the tree would not do: Flax sorts parameters by name and dictionaries give
``l1, l10, l2``, so buckets would wait for gradients from both ends of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.extend import core

# Operations that only wrap a program of their own, which runs where they stand. Loops are left whole: all that a loop
# returns is ready when the loop is.
_TRANSPARENT = {"jit", "pjit", "shard_map", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}


def finishing_times(closed: core.ClosedJaxpr) -> list[int | None]:
    """Says when each output of a traced program is ready.

    Args:
        closed: What ``jax.make_jaxpr`` returns.

    Returns:
        For each output the index of the operation that computes it, wrapped programs counted in line; None if it
        depends on no input, so that its value is constant.
    """
    clock = [0]
    inputs = [0] * len(closed.jaxpr.invars)
    return _walk(closed.jaxpr, inputs, clock)


def _walk(jaxpr: Any, inputs: Iterable[int | None], clock: list[int]) -> list[int | None]:
    ready: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))
    ready.update((var, None) for var in jaxpr.constvars)

    def when(atom: Any) -> int | None:
        return None if isinstance(atom, core.Literal) else ready[atom]

    for equation in jaxpr.eqns:
        arguments = [when(atom) for atom in equation.invars]
        inner = _wrapped(equation)
        if inner is not None and len(inner.invars) == len(arguments):
            times = _walk(inner, arguments, clock)
        else:
            clock[0] += 1
            constant = all(time is None for time in arguments) and equation.primitive.name != "axis_index"
            times = [None if constant else clock[0]] * len(equation.outvars)
        ready.update(zip(equation.outvars, times, strict=True))
    return [when(atom) for atom in jaxpr.outvars]


def _wrapped(equation: Any) -> Any:
    if equation.primitive.name not in _TRANSPARENT:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in equation.params:
            return getattr(equation.params[key], "jaxpr", equation.params[key])
    return None
