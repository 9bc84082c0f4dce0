"""The order in which a traced backward pass finishes the gradients.

Buckets fill in this order. In the tree's order (Flax sorts parameters by name, dictionaries give ``l1, l10, l2``)
buckets would wait for gradients from both ends of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Operations that wrap a program, which is followed. A loop is one operation: its results are ready when it ends.
TRANSPARENT = {"jit", "pjit", "shard_map", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
# Operations without inputs or effects that may give every rank another value: the host's, or the device's own.
_OWN_VALUES = {"pure_callback", "ffi_call", "rng_uniform", "pallas_call"}
# Operations that give zeros if all, or any, of their inputs are.
_ZERO_OF_ZEROS = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose", "neg", "copy", "pvary"}
_ZERO_OF_ZEROS |= {"add", "add_any", "sub", "concatenate", "pad", "reduce_sum", "rev", "slice"}
_ZERO_OF_A_ZERO = {"mul", "dot_general"}


def finishing_times(program: core.ClosedJaxpr, cost: Callable[[Any], float] | None = None) -> list[float | None]:
    """Finds when each output of a traced program is ready.

    Args:
        program: What ``jax.make_jaxpr`` returns.
        cost: Duration of an operation; 1 for each if None.

    Returns:
        For each output the end of the operation that computes it; None if it is constant, because it depends on no
        input, nor on the rank, the device or the host.
    """
    clock = 0.0
    ready: dict[Any, float | None] = {}

    def time_of(atom: Any) -> float | None:
        return None if isinstance(atom, core.Literal) else ready.get(atom)  # the program's constants are not in it

    def run(jaxpr: Any, inputs: Sequence[float | None]) -> list[float | None]:
        nonlocal clock
        ready.update(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            times = list(map(time_of, equation.invars))
            inner = list(core.jaxprs_in_params(equation.params)) if equation.primitive.name in TRANSPARENT else []
            if len(inner) == 1 and len(inner[0].invars) == len(times):
                times = run(inner[0], times)
            else:
                is_constant = set(times) <= {None} and not _may_differ_by_rank(equation)
                # Casts are fused. Traced, those of bfloat16 gradients to the masters' dtype come after the backward.
                if equation.primitive.name != "convert_element_type" or is_constant:
                    clock += cost(equation) if cost else 1
                    times = [None if is_constant else clock] * len(equation.outvars)
            ready.update(zip(equation.outvars, times, strict=True))
        return list(map(time_of, jaxpr.outvars))

    # What the function closes over in an outer trace, such as a rank's key in shard_map, is an input as well.
    consts = zip(program.jaxpr.constvars, program.consts, strict=True)
    ready.update({var: 0.0 for var, const in consts if isinstance(const, jax.core.Tracer)})
    return run(program.jaxpr, [0.0] * len(program.jaxpr.invars))


def zeros(program: core.ClosedJaxpr) -> list[bool]:
    """Finds which outputs of a traced program are zeros whatever its inputs are, as XLA does, which drops their sums.

    Args:
        program: What ``jax.make_jaxpr`` returns.

    Returns:
        For each output whether it is known to be zeros; others may be, by an arithmetic that is not followed.
    """
    known: dict[Any, bool] = {}

    def is_zero(atom: Any) -> bool:
        return not np.any(atom.val) if isinstance(atom, core.Literal) else known.get(atom, False)

    def run(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
        known.update(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            found = list(map(is_zero, equation.invars))
            name = equation.primitive.name
            inner = list(core.jaxprs_in_params(equation.params)) if name in TRANSPARENT else []
            if len(inner) == 1 and len(inner[0].invars) == len(found):
                results = run(inner[0], found)
            else:
                is_kept = (name in _ZERO_OF_ZEROS and all(found)) or (name in _ZERO_OF_A_ZERO and any(found))
                results = [is_kept] * len(equation.outvars)
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(is_zero, jaxpr.outvars))

    return run(program.jaxpr, [False] * len(program.jaxpr.invars))


def matmul_flops(equation: Any) -> float:
    """FLOPs of the matrix products of one traced operation, those of a loop times its length."""
    if equation.primitive.name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        length = math.prod(equation.invars[0].aval.shape[dim] for dim in contracting)
        return 2.0 * equation.outvars[0].aval.size * length
    trips = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
    return trips * sum(matmul_flops(inner) for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns)


def _may_differ_by_rank(equation: Any) -> bool:
    """Whether an operation of constants, or one in its loop or branch, may give each rank another value."""
    # Reading the rank, io_callback and all collectives but ppermute are effects, which loops and branches inherit.
    if equation.effects or "axis_name" in equation.params or equation.primitive.name in _OWN_VALUES:
        return True
    return any(_may_differ_by_rank(inner) for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns)
