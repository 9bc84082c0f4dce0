"""Evaluates a jaxpr operation by operation, and hides how jaxprs differ between versions of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

CALLS = ("jit", "closed_call")  # operations that call a program
CHECKPOINT = "remat2"  # the primitive of ``jax.checkpoint``
# Operations that wrap a program, which is followed. A loop is one operation: its results are ready when it ends.
TRANSPARENT = {*CALLS, CHECKPOINT, "pjit", "shard_map", "checkpoint", "custom_jvp_call", "custom_vjp_call"}


def interpret(
    program: core.ClosedJaxpr, args: Sequence[Any], rule: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Runs a program of ``jax.make_jaxpr``; ``rule`` evaluates an operation, ``(equation, inputs) -> outputs``.

    ``args`` are of any type that ``rule`` accepts.
    """
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = rule(equation, list(map(read, equation.invars)))
        values.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def bind(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Evaluates an operation on arrays, as JAX would."""
    pairs = zip(equation.invars, inputs, strict=True)
    known = {atom: value for atom, value in pairs if not isinstance(atom, core.Literal)}
    jaxpr = _empty().replace(invars=list(known), outvars=equation.outvars, eqns=[equation], effects=equation.effects)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*known.values())


@functools.cache
def _empty() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr  # a jaxpr needs debug information, which only tracing makes


def called_program(equation: Any) -> core.ClosedJaxpr:
    """The program that a call, a checkpoint or a scan runs."""
    program = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
    return program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())


def num_consts_and_carry(scan: Any) -> tuple[int, int]:
    """Numbers of a scan's constants and carries, its first inputs."""
    params = scan.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)
