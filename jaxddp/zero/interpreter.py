"""Runs a traced program operation by operation; what depends on JAX's version about its jaxprs is here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

CALLS = ("jit", "closed_call")  # operations that run a program of their own where they stand
CHECKPOINT = "remat2"  # of ``jax.checkpoint``


def interpret(
    program: core.ClosedJaxpr, args: Sequence[Any], rule: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Runs a program.

    Args:
        program: From ``jax.make_jaxpr``.
        args: One value an input, of any type that ``rule`` knows.
        rule: Carries out an operation: ``(equation, inputs) -> outputs``.

    Returns:
        The program's outputs.
    """
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = rule(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Carries out an operation on arrays, as JAX would."""
    pairs = zip(equation.invars, inputs, strict=True)
    known = {atom: value for atom, value in pairs if not isinstance(atom, core.Literal)}
    jaxpr = _empty().replace(invars=list(known), outvars=equation.outvars, eqns=[equation], effects=equation.effects)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*known.values())


@functools.cache
def _empty() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr  # jaxprs want debug information, which only tracing makes


def called_program(equation: Any) -> core.ClosedJaxpr:
    """The program that a call, a checkpoint or a scan runs."""
    program = equation.params["jaxpr"]
    return program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())


def num_consts_and_carry(scan: Any) -> tuple[int, int]:
    """How many inputs of a scan are the same in every round, and how many go from round to round; they come first."""
    params = scan.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)
