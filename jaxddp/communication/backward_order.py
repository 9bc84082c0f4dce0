"""The trace of a backward pass: the order in which it finishes the gradients, which are constant, and the plan of both.

Buckets fill in this order. In the tree's order (Flax sorts parameters by name, dictionaries give ``l1, l10, l2``)
buckets would wait for gradients from both ends of the model.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from ..interpreter import TRANSPARENT
from ..strategy import Strategy
from ..tree import named_leaves, tensor_specs
from .buckets import BucketPlan, TensorSpec, plan_buckets
from .planned import zeros

# Operations without inputs or effects that may give every rank another value: the host's, or the device's own.
_OWN_VALUES = {"pure_callback", "ffi_call", "rng_uniform", "pallas_call"}


def plan_trace(strategy: Strategy, trace: GradientTrace, param_dtypes: Mapping[str, str] | None = None) -> BucketPlan:
    """Plans the communication of the gradients of a traced backward pass.

    Args:
        strategy: How gradients are communicated.
        trace: Of the backward pass on one rank.
        param_dtypes: In which updated parameters are gathered, by name; None: those of their gradients.

    Returns:
        The plan.
    """
    # Only what depends on an input is planned: XLA drops the reduction of a constant.
    plan = replace(strategy.plan(trace.tensors), constants=tuple(tensor.name for tensor in trace.constants))
    if plan.kind == "all-reduce":
        return plan
    # A constant gradient is not sent; its parameter is gathered, because weight decay and moments still change it.
    buckets = plan.buckets + plan_buckets(trace.constants, None).buckets
    if param_dtypes is not None:
        of_params = [[tensor._replace(dtype=param_dtypes[tensor.name]) for tensor in one.tensors] for one in buckets]
        buckets = tuple(bucket for tensors in of_params for bucket in plan_buckets(tensors, None).buckets)
    return replace(plan, gathers=buckets)


class GradientTrace(NamedTuple):
    """A traced backward pass.

    Attributes:
        tensors: The gradients that depend on an input, in the order in which they become ready.
        constants: The others, such as the zeros of an unused parameter.
        program: The trace.
        outputs: Index of each of ``tensors`` among the trace's outputs.
        constant_outputs: Those of ``constants``.
        result: What was traced returns; a tree of ``jax.ShapeDtypeStruct``.
    """

    tensors: tuple[TensorSpec, ...]
    constants: tuple[TensorSpec, ...]
    program: core.ClosedJaxpr
    outputs: tuple[int, ...]
    constant_outputs: tuple[int, ...]
    result: Any

    def __call__(self, *args: Any) -> Any:
        """Computes what was traced, of arguments like those that it was traced with."""
        found = core.jaxpr_as_fun(self.program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.result), found)

    @property
    def flops_before(self) -> tuple[float, ...]:
        """Share of the trace's matrix products done before each of the tensors is ready."""
        times = finishing_times(self.program, matmul_flops)
        flops = [times[output] or 0.0 for output in self.outputs]
        total = max(flops, default=0.0) or 1.0
        return tuple(each / total for each in flops)

    def with_constants_sent(self) -> GradientTrace:
        """The same trace, whose constants are sent first but for those that are zeros: of them nobody needs a sum."""
        are_zeros = zeros(self.program)
        pairs = list(zip(self.constant_outputs, self.constants, strict=True))
        sent = [pair for pair in pairs if pair[1].num_elements and not are_zeros[pair[0]]]
        kept = [pair for pair in pairs if pair not in sent]
        return self._replace(
            tensors=(*(tensor for _, tensor in sent), *self.tensors),
            outputs=(*(output for output, _ in sent), *self.outputs),
            constants=tuple(tensor for _, tensor in kept),
            constant_outputs=tuple(output for output, _ in kept),
        )


def trace_gradients(
    grad_fn: Callable[..., Any], *args: Any, has_aux: bool = False, reduced: Collection[str] = ()
) -> GradientTrace:
    """Traces the computation of gradients.

    Args:
        grad_fn: As for ``plan_gradients``.
        *args: Its arguments on one rank.
        has_aux: Whether it returns the gradients and something else.
        reduced: Names of gradients that the backward itself reduces; they are left out.

    Returns:
        The order of the gradients.
    """
    program, result = jax.make_jaxpr(grad_fn, return_shape=True)(*args)
    specs = list(tensor_specs(named_leaves(result[0] if has_aux else result)).values())
    # By index among the trace's outputs, of which gradients come first.
    ready: dict[int, float] = {}
    constants: dict[int, TensorSpec] = {}
    for output, (spec, time) in enumerate(zip(specs, finishing_times(program), strict=not has_aux)):
        if spec.name in reduced:
            continue
        if time is None or spec.num_elements == 0:
            constants[output] = spec
        else:
            ready[output] = time
    outputs = tuple(sorted(reversed(ready), key=ready.__getitem__))  # the last comes first where times are equal
    tensors = tuple(map(specs.__getitem__, outputs))
    return GradientTrace(tensors, tuple(constants.values()), program, outputs, tuple(constants), result)


def describe_results(trace: GradientTrace) -> str:
    """Describes what processes must agree on in a backward pass, beside the plan, which does not see it.

    Results of other shapes would make them wait for each other. A constant gradient is not sent, so ranks would differ
    where processes compute it from constants of their own.

    Args:
        trace: Of one rank, with its metrics.

    Returns:
        A checksum of the shapes of the results, and of the program of the constant gradients.
    """
    shapes = list(map(str, trace.program.out_avals))
    is_constant = [output in trace.constant_outputs for output in range(len(shapes))]
    gradients, _ = partial_eval.dce_jaxpr(trace.program.jaxpr, is_constant)
    read = {str(atom) for equation in gradients.eqns for atom in equation.invars}
    held = [pair for pair in zip(gradients.constvars, trace.program.consts, strict=True) if str(pair[0]) in read]
    text = f"{shapes} {gradients.replace(constvars=[var for var, _ in held])}"
    checksum = zlib.crc32(re.sub(r"0x[0-9a-f]+", "", text).encode())  # functions are printed with their addresses
    for _, value in held:
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        checksum = zlib.crc32(np.asarray(jax.random.key_data(value) if is_key else value).tobytes(), checksum)
    return f"checksum {checksum:08x}"


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
