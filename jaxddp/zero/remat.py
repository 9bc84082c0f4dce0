"""Runs one unit: its parameters are gathered, used and dropped, and gathered again in the backward.

    y = unit(gather(shards), x)          gather: one all-gather      its transpose: one reduce-scatter

The backward needs the parameters again. A unit is therefore a checkpoint of a special kind. Kept for the backward are
its inputs, and the results of its matrix products and other costly operations that depend on ``x``; what is cheap is
computed again from these, which is little more than XLA does on its own when it fuses; and what depends on parameters
alone, the gathered parameters and copies of them, is gathered again. The last unit keeps all, because the backward
begins there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from .elementwise import ELEMENTWISE
from .gather import Shard

Gather = Callable[[Sequence[Shard]], Sequence[jax.Array]]

CHECKPOINTS = ("remat2", "checkpoint", "remat")
WRAPPERS = ("jit", "pjit", "closed_call", *CHECKPOINTS)
_ACTIVATION = "jaxddp.activation"
_CHEAP = ELEMENTWISE | {
    "argmax", "argmin", "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "expand_dims",
    "gather", "iota", "pad", "pcast", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "reshape",
    "rev", "slice", "split", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip


def run_unit(program: core.ClosedJaxpr, inputs: Sequence[Any], gather: Gather, *, keep: bool) -> Sequence[Any]:
    """Runs a unit.

    Args:
        program: What it computes of whole parameters and other arrays.
        inputs: Its inputs, some of them a ``Shard``.
        gather: Shards ``->`` wholes, in one collective for each dtype.
        keep: Whether the backward may keep the gathered parameters.

    Returns:
        Its results.
    """
    places = [place for place, value in enumerate(inputs) if isinstance(value, Shard)]
    held = [inputs[place] for place in places]

    def compute(locals_: list[jax.Array], others: list[Any]) -> list[Any]:
        shards = [shard.of(local) for shard, local in zip(held, locals_, strict=True)]
        wholes, others = _together(gather(shards), others)
        arguments, rest = dict(zip(places, wholes, strict=True)), iter(others)
        values = [arguments[place] if place in arguments else next(rest) for place in range(len(inputs))]
        if keep:
            return core.jaxpr_as_fun(program)(*values)
        return _name_activations(program, values, [place not in arguments for place in range(len(inputs))])

    if not keep:
        compute = jax.checkpoint(compute, policy=jax.checkpoint_policies.save_only_these_names(_ACTIVATION))
    return compute([shard.local for shard in held], [value for value in inputs if not isinstance(value, Shard)])


def bind(jaxpr: Any, equation: Any, inputs: list[Any]) -> Sequence[Any]:
    """Carries out one operation of a program."""
    pairs = zip(equation.invars, inputs, strict=True)
    known = {atom: value for atom, value in pairs if not isinstance(atom, core.Literal)}
    alone = jaxpr.replace(
        constvars=[], invars=list(known), outvars=equation.outvars, eqns=[equation], effects=equation.effects
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*known.values())


def _together(wholes: Sequence[jax.Array], others: Sequence[Any]) -> tuple[Sequence[jax.Array], list[Any]]:
    """Passes a unit's inputs on; in the backward the gradients of all are there before any goes further.

    Left to itself, XLA runs ahead through the gradients of activations, and keeps for later what those of the
    parameters need: of all units at a time. Inputs that nobody wants a gradient of, such as a batch, are left out, or
    the barrier would ask for it, and the parameters that it needs would be gathered again for nothing.
    """
    floating = [jnp.issubdtype(other.dtype, jnp.floating) for other in others]

    @jax.custom_vjp
    def identity(arrays: list[jax.Array]) -> list[jax.Array]:
        return arrays

    def forward(arrays: list[Any]) -> tuple[list[jax.Array], _Wanted]:
        return [array.value for array in arrays], _Wanted(tuple(array.perturbed for array in arrays))

    def backward(wanted: _Wanted, grads: list[Any]) -> tuple[list[Any]]:
        zero = jax.custom_derivatives.SymbolicZero
        real = [wants and not isinstance(grad, zero) for wants, grad in zip(wanted.each, grads, strict=True)]
        there = iter(lax.optimization_barrier([grad for grad, keep in zip(grads, real, strict=True) if keep]))
        return ([next(there) if keep else None for keep in real],)

    identity.defvjp(forward, backward, symbolic_zeros=True)
    tied = [other for other, tie in zip(others, floating, strict=True) if tie]
    passed = iter(identity([*wholes, *tied]))
    wholes = [next(passed) for _ in wholes]
    return wholes, [next(passed) if tie else other for other, tie in zip(others, floating, strict=True)]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Of which inputs a gradient is wanted."""

    each: tuple[bool, ...]


def _is_cheap(equation: Any) -> bool:
    """Whether computing its result again costs no more than reading its inputs."""
    inner = list(core.jaxprs_in_params(equation.params))
    if equation.primitive.name in ("custom_jvp_call", *WRAPPERS):
        return all(_is_cheap(one) for jaxpr in inner for one in jaxpr.eqns)
    return equation.primitive.name in _CHEAP


def _name_activations(program: core.ClosedJaxpr, args: list[Any], is_activation: list[bool]) -> list[Any]:
    """Runs a program and names all that depends on its activations, so that a checkpoint may keep it."""

    def walk(jaxpr: Any, consts: Sequence[Any], args: list[Any], depends: list[bool]) -> list[tuple[Any, bool]]:
        known: dict[Any, tuple[Any, bool]] = {
            var: (const, False) for var, const in zip(jaxpr.constvars, consts, strict=True)
        }
        known.update(zip(jaxpr.invars, zip(args, depends, strict=True), strict=True))

        def read(atom: Any) -> tuple[Any, bool]:
            return (atom.val, False) if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            values, from_activations = zip(*map(read, equation.invars), strict=True) if equation.invars else ((), ())
            if equation.primitive.name in ("jit", "pjit", "closed_call"):
                inner = equation.params["jaxpr"]
                results = walk(inner.jaxpr, inner.consts, list(values), list(from_activations))
            else:
                depending = any(from_activations)
                found = bind(jaxpr, equation, list(values))
                is_kept = depending and not _is_cheap(equation)
                results = [(_named(value) if is_kept else value, depending) for value in found]
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return [value for value, _ in walk(program.jaxpr, program.consts, args, is_activation)]


def _named(value: Any) -> Any:
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    return value if is_key else checkpoint_name(value, _ACTIVATION)
