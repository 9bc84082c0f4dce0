"""The trace of a backward pass: the order in which it finishes the gradients, which are constant, and the plan of both.

Buckets fill in this order. In the tree's order (Flax sorts parameters by name, dictionaries give ``l1, l10, l2``)
buckets would wait for gradients from both ends of the model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ..interpreter import TRANSPARENT, checksum, equations_in, interpret
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
    """Describes what processes must agree on in a backward pass of one rank, beside the plan, which does not see it.

    Results of other shapes would make them wait for each other. A constant gradient is not sent, so ranks would differ
    where processes compute it from constants of their own.
    """
    shapes = list(map(str, trace.program.out_avals))
    is_constant = [output in trace.constant_outputs for output in range(len(shapes))]
    return f"checksum {zlib.crc32(str(shapes).encode(), checksum(trace.program, is_constant)):08x}"


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

    def rule(equation: Any, times: list[float | None]) -> list[float | None]:
        nonlocal clock
        is_constant = {*times} <= {None} and not _may_differ_by_rank(equation)
        # Casts are fused. Traced, those of bfloat16 gradients to the masters' dtype come after the backward.
        if equation.primitive.name == "convert_element_type" and not is_constant:
            return times
        clock += cost(equation) if cost else 1
        return [None if is_constant else clock] * len(equation.outvars)

    def constant(value: Any, _: Any) -> float | None:
        # What the function closes over in an outer trace, such as a rank's key in shard_map, is an input as well.
        return 0.0 if isinstance(value, jax.core.Tracer) else None

    return interpret(program, [0.0] * len(program.in_avals), rule, constant, TRANSPARENT)


def matmul_flops(equation: Any) -> float:
    """FLOPs of the matrix products of one traced operation, those of a loop times its length."""
    if equation.primitive.name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        length = math.prod(equation.invars[0].aval.shape[dim] for dim in contracting)
        return 2.0 * equation.outvars[0].aval.size * length
    trips = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
    return trips * sum(map(matmul_flops, equations_in(equation)))


def _may_differ_by_rank(equation: Any) -> bool:
    """Whether an operation of constants, or one in its loop or branch, may give each rank another value."""
    # Reading the rank, io_callback and all collectives but ppermute are effects, which loops and branches inherit.
    if equation.effects or "axis_name" in equation.params or equation.primitive.name in _OWN_VALUES:
        return True
    return any(map(_may_differ_by_rank, equations_in(equation)))
