"""Reads a jaxpr operation by operation, on values of any kind, and hides how jaxprs differ between versions of JAX."""

from __future__ import annotations

import functools
import itertools
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

CALLS = ("jit", "closed_call")  # operations that call a program
CHECKPOINT = "remat2"  # the primitive of ``jax.checkpoint``
# Operations that wrap a program, which is followed. A loop is one operation: its results are ready when it ends.
TRANSPARENT = frozenset({*CALLS, CHECKPOINT, "pjit", "shard_map", "checkpoint", "custom_jvp_call", "custom_vjp_call"})


def interpret(
    program: core.ClosedJaxpr,
    args: Sequence[Any],
    rule: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any] = lambda value, atom: value,
    entered: Collection[str] = (),
) -> list[Any]:
    """Runs a program of ``jax.make_jaxpr`` on values of any kind.

    Args:
        program: A ``ClosedJaxpr``.
        args: Its inputs.
        rule: Evaluates an operation, ``(equation, inputs) -> outputs``.
        constant: The value of a literal or a constant, ``(array, its atom in the jaxpr)``.
        entered: Names of the operations whose program is run by the same rule.
    """
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.invars, args, strict=True))
    values |= {var: constant(array, var) for var, array in zip(jaxpr.constvars, program.consts, strict=True)}

    def read(atom: Any) -> Any:
        return constant(atom.val, atom) if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = list(map(read, equation.invars))
        if equation.primitive.name in entered:
            outputs: Sequence[Any] = interpret(called_program(equation), inputs, rule, constant, entered)
        else:
            outputs = rule(equation, inputs)
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
    return closed(equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"])


def closed(program: Any) -> core.ClosedJaxpr:
    """A program of an operation, whose constants, if it has any, are not known."""
    return program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, program.constvars)


def equations_in(equation: Any) -> Iterator[Any]:
    """The operations of the programs in an operation: of a call, of a loop's round, of branches."""
    return (inner for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns)


def num_consts_and_carry(scan: Any) -> tuple[int, int]:
    """Numbers of a scan's constants and carries, its first inputs."""
    params = scan.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)


def checksum(program: core.ClosedJaxpr, is_wanted: Sequence[bool]) -> int:
    """A number that tells programs apart by what they compute for some of their outputs, constants included."""
    jaxpr, is_used = partial_eval.dce_jaxpr(program.jaxpr, list(is_wanted))
    numbers: dict[Any, int] = defaultdict(itertools.count().__next__)  # equal expressions have equal numbers

    def constant(value: Any, atom: Any) -> int:
        is_key = jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(value)) if is_key else np.asarray(value, atom.aval.dtype)
        return numbers[str(atom.aval), data.tobytes()]

    def rule(equation: Any, inputs: list[int]) -> list[int]:
        operation = equation.primitive.name, str(equation.params), *inputs
        return [numbers[*operation, place] for place in range(len(equation.outvars))]

    inputs = [numbers["input", place] for place in itertools.compress(itertools.count(), is_used)]
    found = interpret(core.ClosedJaxpr(jaxpr, program.consts), inputs, rule, constant, TRANSPARENT)
    text = re.sub(r"0x[0-9a-f]+", "", f"{[*numbers]} {found}")  # functions are printed with their addresses
    return zlib.crc32(text.encode())
