"""What a step should communicate: planned from a trace of the backward, and listed as compiled programs list it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from ..strategy import Ranks, Strategy
from ..tree import named_leaves, tensor_specs
from . import gloo
from .backward_order import finishing_times, matmul_flops, zeros
from .buckets import Bucket, BucketPlan, TensorSpec, bucket_width, dtype_bytes, plan_buckets
from .collectives import kind_of
from .traced import Planned, traced_collectives, wire_bytes


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

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> GradientTrace:
        """The same trace of gradients of other shapes, such as those of the blocks on a device."""
        tensors, constants = (
            tuple(tensor._replace(shape=shapes[tensor.name]) for tensor in some)
            for some in (self.tensors, self.constants)
        )
        return self._replace(tensors=tensors, constants=constants)

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


def planned_collectives(
    strategy: Strategy, plan: BucketPlan, num_ranks: int, platform: str = "gpu", *, num_microbatches: int = 1
) -> list[tuple[str, int]]:
    """Lists what a plan communicates in one step.

    Args:
        strategy: The plan's strategy.
        plan: The plan.
        num_ranks: Number of ranks; one rank communicates nothing.
        platform: What it is compiled for.
        num_microbatches: Parts of each rank's batch.

    Returns:
        ``(kind, bytes of the full buffer on the wire)`` in launch order.
    """
    ranks = Ranks("data", num_ranks, num_ranks)
    return [(one.kind, one.num_bytes) for one in planned_along(strategy, plan, ranks, platform, num_microbatches)]


def planned_along(
    strategy: Strategy, plan: BucketPlan, ranks: Ranks, platform: str, num_microbatches: int
) -> list[Planned]:
    """Lists what a plan communicates in one step, and along which mesh axes; arguments as ``planned_collectives``."""
    if ranks.num_ranks == 1 or not strategy.sends:
        return []
    shards, replicas, num_shards = (ranks.shard_axis,), ranks.replica_axes, ranks.num_shards

    def scattered(bucket: Bucket) -> list[Planned]:
        elements = num_shards * bucket_width(bucket, num_shards)
        found = [Planned(*planned_exchange("reduce-scatter", elements, bucket.dtype, num_shards, platform), shards)]
        num_bytes = wire_bytes(elements, bucket.dtype, platform) // num_shards
        return found + [Planned("all-reduce", num_bytes, replicas)] * bool(replicas)

    def all_reduced(bucket: Bucket) -> list[Planned]:
        axes = (*replicas, *shards)
        if strategy.hook is not None:
            return _of_hook(strategy.hook, bucket, ranks, platform)
        return [Planned("all-reduce", wire_bytes(bucket.num_elements, bucket.dtype, platform), axes)]

    each = all_reduced if plan.kind == "all-reduce" else scattered
    reductions = [one for bucket in plan.buckets for one in each(bucket)]
    gathers = [
        Planned(
            *planned_exchange(
                "all-gather", num_shards * bucket_width(one, num_shards), one.dtype, num_shards, platform
            ),
            shards,
        )
        for one in plan.gathers
    ]
    return reductions * (num_microbatches if plan.each_microbatch else 1) + gathers


def _of_hook(hook: Callable[..., Any], bucket: Bucket, ranks: Ranks, platform: str) -> list[Planned]:
    """What a hook communicates of a bucket, read off its trace."""
    names = (ranks.axis,) if isinstance(ranks.axis, str) else ranks.axis
    sizes = [
        (name, ranks.num_shards if name == ranks.shard_axis else ranks.num_ranks // ranks.num_shards) for name in names
    ]
    buffer = jax.ShapeDtypeStruct((bucket.num_elements,), jnp.dtype(bucket.dtype))
    program = jax.make_jaxpr(lambda buffer: hook(buffer, ranks.axis), axis_env=sizes)(buffer)
    return traced_collectives(program, platform, of_loss=True).each


def planned_exchange(kind: str, num_elements: int, dtype: Any, num_ranks: int, platform: str) -> tuple[str, int]:
    """Says what a reduce-scatter, an all-gather or an all-to-all compiles to.

    Args:
        kind: Which of them.
        num_elements: Of the full buffer.
        dtype: Of the buffer.
        num_ranks: Number of ranks that exchange.
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Returns:
        ``(kind, bytes on the wire)``.

    Example:
        >>> planned_exchange("reduce-scatter", 8, "float32", 2, "gpu")
        ('reduce-scatter', 32)
    """
    compiled, width = kind_of(kind, num_ranks, platform), dtype_bytes(str(dtype))
    if compiled == "all-reduce":
        return compiled, gloo.swapped_bytes(num_elements // num_ranks, width)
    return compiled, wire_bytes(num_elements, dtype, platform) if kind == "reduce-scatter" else num_elements * width
