"""A reader of jaxprs on values of any kind, and what it finds in the trace of a backward pass.

The trace says in which order the backward finishes the gradients, and which are constant. Buckets fill in this order:
in the tree's order (dictionaries give ``l1, l10, l2``) they would wait for gradients from both ends of the model.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from ..scopes import SYNC_SCOPE
from ..strategy import Strategy
from ..tree import named_leaves, tensor_specs
from .buckets import BucketPlan, TensorSpec, plan_buckets

CALLS = ("jit", "closed_call")  # operations that call a program
CHECKPOINT = "remat2"  # the primitive of ``jax.checkpoint``
# Operations that wrap a program, which is followed. A loop is one operation: its results are ready when it ends.
TRANSPARENT = frozenset({*CALLS, CHECKPOINT, "pjit", "shard_map", "checkpoint", "custom_jvp_call", "custom_vjp_call"})
# Operations without inputs or effects that may give every rank another value: the host's, or the device's own.
_OWN_VALUES = {"pure_callback", "ffi_call", "rng_uniform", "pallas_call"}
_WRAPPERS = TRANSPARENT - {"shard_map"}  # whose shapes differ inside
_RESHAPES = frozenset(("broadcast_in_dim", "reshape", "slice", "squeeze"))  # the identity if the shape stays the same
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil "
    "clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 "
    "floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt "
    "lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow "
    "real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta".split()
)
VARIES, CONSTANT, ZERO = range(3)  # what is known of a value when the program is compiled
_KEEP_ZERO = frozenset(  # zeros if all inputs are
    "add add_any bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy neg pad psum pvary"
    " reduce_scatter reduce_sum reshape rev slice split squeeze sub transpose".split()
)
_NEVER_CONSTANT = frozenset("optimization_barrier pure_callback io_callback ffi_call".split())
_CALLS = TRANSPARENT - {CHECKPOINT, "checkpoint"}  # XLA sees no constants through the barriers of a checkpoint


def interpret(
    program: core.ClosedJaxpr,
    args: Sequence[Any],
    rule: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any] = lambda value, atom: value,
    entered: Collection[str] = (),
) -> list[Any]:
    """Runs a program of ``jax.make_jaxpr`` on values of any kind.

    ``rule`` evaluates an operation, ``(equation, inputs) -> outputs``, but runs the programs of ``entered`` ones;
    ``constant`` gives the value of a literal or a constant, of ``(array, its atom in the jaxpr)``.
    """
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.invars, args, strict=True))
    values |= {var: constant(array, var) for var, array in zip(jaxpr.constvars, program.consts, strict=True)}
    for equation in jaxpr.eqns:
        inputs = [constant(one.val, one) if isinstance(one, core.Literal) else values[one] for one in equation.invars]
        if equation.primitive.name in entered:
            outputs: Sequence[Any] = interpret(called_program(equation), inputs, rule, constant, entered)
        else:
            outputs = rule(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [constant(one.val, one) if isinstance(one, core.Literal) else values[one] for one in jaxpr.outvars]


def bind(jaxpr: Any, equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Evaluates an operation of a jaxpr on arrays, as JAX would."""
    pairs = zip(equation.invars, inputs, strict=True)
    known = {atom: value for atom, value in pairs if not isinstance(atom, core.Literal)}
    alone = {"invars": [*known], "outvars": equation.outvars, "eqns": [equation], "effects": equation.effects}
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr.replace(constvars=[], **alone), ()))(*known.values())


def called_program(equation: Any) -> core.ClosedJaxpr:
    """The program that a call, a checkpoint or a scan runs."""
    program = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
    return program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())


def nested(equation: Any) -> Iterator[Any]:
    """An operation, and those of the programs in it: of a call, a loop's round, a branch."""
    yield equation
    for jaxpr in core.jaxprs_in_params(equation.params):
        for inner in jaxpr.eqns:
            yield from nested(inner)


def num_consts_and_carry(scan: Any) -> tuple[int, int]:
    """Numbers of a scan's constants and carries, its first inputs."""
    params = scan.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)


class Value(NamedTuple):
    """A value in a trace."""

    number: int  # of its expression
    is_uniform: bool = False  # whether it is known to be one number, or equal at every element


def expressions(program: Any, inputs: Sequence[Value]) -> list[Value]:
    """A program's outputs. Equal expressions have equal numbers in any trace; element-wise ones count no shapes."""

    def constant(value: Any, atom: Any) -> Value:
        aval, is_key = atom.aval, jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if is_key else value, None if is_key else aval.dtype)
        data, size = array.tobytes(), math.prod(aval.shape)
        one = data[: len(data) // max(size, 1)]
        is_uniform = data == one * size
        return Value(_number(aval.dtype, one) if is_uniform else _number(aval, data), is_uniform)

    def combined(values: Sequence[Value], *operation: Any) -> Value:
        """An array of which each element is computed from elements of others at the same position."""
        number = _number(*operation, *(value.number for value in values))
        return Value(number, all(value.is_uniform for value in values))

    def rule(equation: Any, operands: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        shapes = tuple(atom.aval.shape for atom in equation.invars)
        out_shapes = [var.aval.shape for var in equation.outvars]
        if name == "optimization_barrier":
            return operands
        if name == "cond":
            options = zip(*(expressions(branch, operands[1:]) for branch in params["branches"]), strict=True)
            return [combined((operands[0], *option), name) for option in options]
        if name in _RESHAPES:
            moves = name == "reshape" and params["dimensions"] not in (None, tuple(range(len(shapes[0]))))
            if operands[0].is_uniform or (shapes[0] == out_shapes[0] and not moves):
                return operands[:1]
        if name in ELEMENTWISE and (name != "bitcast_convert_type" or shapes == (*out_shapes,)):  # of one width
            pairs = zip(operands, shapes, strict=True)
            # Of an operand with a dimension of 1, each element meets several, which may be on other ranks.
            apart = [shape for value, shape in pairs if not value.is_uniform and shape != out_shapes[0]]
            return [combined(operands, name, params, apart and (shapes, out_shapes))]
        numbers = [_number(name, params, shapes, place, *operands) for place in range(len(out_shapes))]
        return [Value(number, math.prod(shape) <= 1) for number, shape in zip(numbers, out_shapes, strict=True)]

    return interpret(program, inputs, rule, constant, _WRAPPERS)


def plan_trace(strategy: Strategy, trace: GradientTrace, param_dtypes: Mapping[str, str] | None = None) -> BucketPlan:
    """Plans the communication of the gradients of a traced backward pass, and of updated parameters in their dtypes."""
    # Only what depends on an input is planned: XLA drops the reduction of a constant.
    constants = tuple(trace.constants.values())
    plan = replace(strategy.plan(tuple(trace.tensors.values())), constants=tuple(one.name for one in constants))
    if plan.kind == "all-reduce":
        return plan
    # A constant gradient is not sent; its parameter is gathered, because weight decay and moments still change it.
    buckets = plan.buckets + plan_buckets(constants, None).buckets
    if param_dtypes is not None:
        of_params = [[tensor._replace(dtype=param_dtypes[tensor.name]) for tensor in one.tensors] for one in buckets]
        buckets = tuple(bucket for tensors in of_params for bucket in plan_buckets(tensors, None).buckets)
    return replace(plan, gathers=buckets)


class GradientTrace(NamedTuple):
    """A traced backward pass; gradients by their index among the trace's outputs."""

    tensors: dict[int, TensorSpec]  # those that depend on an input, in the order in which they become ready
    constants: dict[int, TensorSpec]  # the others, such as the zeros of an unused parameter
    program: core.ClosedJaxpr
    result: Any  # what was traced returns: a tree of jax.ShapeDtypeStruct

    def __call__(self, *args: Any) -> Any:
        """Computes what was traced, of arguments like those that it was traced with."""
        found = core.jaxpr_as_fun(self.program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.result), found)

    def with_constants_sent(self) -> GradientTrace:
        """The same trace, whose constants are sent first but for those that are zeros: of them nobody needs a sum."""
        known = follow(self.program, [VARIES] * len(self.program.in_avals), lambda *_: None)
        sent = {output: one for output, one in self.constants.items() if one.num_elements and known[output] != ZERO}
        kept = {output: one for output, one in self.constants.items() if output not in sent}
        return self._replace(tensors=sent | self.tensors, constants=kept)


def trace_gradients(
    grad_fn: Callable[..., Any], *args: Any, has_aux: bool = False, reduced: Collection[str] = ()
) -> GradientTrace:
    """Traces one rank's gradients, with ``has_aux`` the first of two results; ``reduced`` ones are left out."""
    program, result = jax.make_jaxpr(grad_fn, return_shape=True)(*args)
    specs = tensor_specs(named_leaves(result[0] if has_aux else result)).values()
    # Among the trace's outputs, gradients come first.
    timed = enumerate(zip(specs, finishing_times(program), strict=not has_aux))
    found = {output: pair for output, pair in timed if pair[0].name not in reduced}
    constants = {output: spec for output, (spec, time) in found.items() if time is None or not spec.num_elements}
    changing = [output for output in reversed(found) if output not in constants]  # the last first at equal times
    ready = sorted(changing, key=lambda output: found[output][1] or 0)
    return GradientTrace({output: found[output][0] for output in ready}, constants, program, result)


def describe_results(trace: GradientTrace) -> str:
    """What processes must agree on beside the plan: shapes of results, and constant gradients, which are not sent."""
    values = expressions(trace.program, [Value(place) for place in range(len(trace.program.in_avals))])
    described = [*map(str, trace.program.out_avals), *(values[output] for output in sorted(trace.constants))]
    return f"checksum {zlib.crc32(str(described).encode()):08x}"


def finishing_times(program: core.ClosedJaxpr) -> list[int | None]:
    """How many operations come before each output; None if it depends on no input, rank, device or host."""
    clock = 0

    def rule(equation: Any, times: list[int | None]) -> list[int | None]:
        nonlocal clock
        # Reading the rank, io_callback and all collectives but ppermute are effects, which loops and branches inherit.
        is_constant = {*times} <= {None} and not any(
            one.effects or "axis_name" in one.params or one.primitive.name in _OWN_VALUES for one in nested(equation)
        )
        # Casts are fused. Traced, those of bfloat16 gradients to the masters' dtype come after the backward.
        if equation.primitive.name == "convert_element_type" and not is_constant:
            return times
        clock += 1
        return [None if is_constant else clock] * len(equation.outvars)

    # What the function closes over in an outer trace, such as a rank's key in shard_map, is an input as well.
    return interpret(
        program, [0] * len(program.in_avals), rule,
        lambda value, _: 0 if isinstance(value, jax.core.Tracer) else None, TRANSPARENT,
    )  # fmt: skip


def follow(
    program: core.ClosedJaxpr, inputs: Sequence[int], visit: Callable[..., None], times: int = 1, is_sync: bool = False
) -> list[int]:
    """What is known of a program's results; visits operations with what is known of their inputs, and how often."""

    def rule(equation: Any, operands: list[int]) -> list[int]:
        name, params = equation.primitive.name, equation.params
        # The names inside a call may lack those of its own scope.
        in_sync = is_sync or SYNC_SCOPE in str(equation.source_info.name_stack)
        visit(equation, operands, times, in_sync)
        if name in _CALLS:
            return follow(called_program(equation), operands, visit, times, in_sync)
        for inner in core.jaxprs_in_params(params):
            rounds, varying = params["length"] if name == "scan" else 1, [VARIES] * len(inner.invars)
            follow(core.ClosedJaxpr(inner, inner.constvars), varying, visit, times * rounds, in_sync)
        result = VARIES if name in _NEVER_CONSTANT else min(operands, default=CONSTANT)
        if result == ZERO and name not in _KEEP_ZERO:
            result = CONSTANT
        if name in ("mul", "dot_general") and ZERO in operands or name == "dynamic_slice" and operands[0] == ZERO:
            result = ZERO  # a slice wherever it starts
        return [result] * len(equation.outvars)

    def constant(value: Any, atom: Any) -> int:
        return ZERO if isinstance(atom, core.Literal) and np.ndim(value) == 0 and value == 0 else CONSTANT

    return interpret(program, inputs, rule, constant)


def _number(*parts: Any) -> int:
    """A number of an expression, in any process: equal ones have equal numbers."""
    text = str([zlib.crc32(part) if isinstance(part, bytes) else part for part in parts])
    return zlib.crc32(re.sub(r"0x[0-9a-f]+", "", text).encode())  # functions are printed with their addresses
