"""Runs one unit: gathers its parameters, uses and drops them, and gathers them again in the backward.

    y = unit(gather(shards), x)          gather: one all-gather      its transpose: one reduce-scatter

A unit is a ``jax.checkpoint`` that decides by what a value depends on:

    saved            the unit's inputs; results of matrix products and other costly operations that depend on ``x``
    computed again   results of cheap operations, little more than XLA recomputes when it fuses
    gathered again   what depends on parameters alone: the parameters, and copies of them

The last unit keeps everything, because the backward begins there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from ..interpreter import CALLS, CHECKPOINT, bind, called_program, interpret
from .elementwise import ELEMENTWISE
from .gather import Gather, Shard
from .ordering import UnitOrder

_ACTIVATION = "jaxddp.activation"
_CHEAP = ELEMENTWISE | {
    "argmax", "argmin", "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "expand_dims",
    "gather", "iota", "pad", "pcast", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "reshape",
    "rev", "slice", "split", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip


def run_unit(
    program: core.ClosedJaxpr, inputs: Sequence[Any], gather: Gather, order: UnitOrder, *, keep: bool
) -> Sequence[Any]:
    """Runs a unit.

    Args:
        program: The traced unit, a function of full parameters and other arrays.
        inputs: The program's inputs, some of them a ``Shard``.
        gather: Shards ``->`` full parameters.
        order: Of the units that ran before.
        keep: Whether the backward may keep the gathered parameters.

    Returns:
        The program's results.
    """
    places = [place for place, value in enumerate(inputs) if isinstance(value, Shard)]
    shards = [inputs[place] for place in places]

    def compute(local: Sequence[jax.Array], others: list[Any]) -> list[Any]:
        full = gather([replace(shard, local=array) for shard, array in zip(shards, local, strict=True)])
        full, others = _tie_gradients(full, others)
        values = others if keep else [_Activation(value) for value in others]
        for place, param in zip(places, full, strict=True):  # ascending, so every input gets its old position back
            values.insert(place, param)
        return core.jaxpr_as_fun(program)(*values) if keep else _save_activations(program, values)

    if not keep:
        compute = jax.checkpoint(compute, policy=jax.checkpoint_policies.save_only_these_names(_ACTIVATION))
    local, token = order.before([shard.local for shard in shards])
    return order.after(compute(local, [value for value in inputs if not isinstance(value, Shard)]), token)


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


@dataclass(frozen=True)
class _Activation:
    """A value that depends on more than parameters."""

    value: Any


def _save_activations(program: core.ClosedJaxpr, inputs: list[Any]) -> list[Any]:
    """Runs a program and names what the checkpoint saves: results of costly operations on activations."""

    def rule(equation: Any, inputs: list[Any]) -> Sequence[Any]:
        if equation.primitive.name in CALLS:
            return interpret(called_program(equation), inputs, rule)
        results = bind(equation, [_value(value) for value in inputs])
        if not any(isinstance(value, _Activation) for value in inputs):
            return results
        return [_Activation(result if _is_cheap(equation) else _named(result)) for result in results]

    return [_value(result) for result in interpret(program, inputs, rule)]


def _value(value: Any) -> Any:
    return value.value if isinstance(value, _Activation) else value


def _named(value: Any) -> Any:
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    return value if is_key else checkpoint_name(value, _ACTIVATION)


def _is_cheap(equation: Any) -> bool:
    """Whether recomputing its result costs no more than reading its inputs."""
    if equation.primitive.name in ("custom_jvp_call", CHECKPOINT, *CALLS):
        return all(_is_cheap(inner) for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns)
    return equation.primitive.name in _CHEAP
