"""The contract of a strategy, and the planning of what a strategy communicates.

A strategy decides which gradients are communicated together and whether the first collective waits for the whole
backward (its ``BucketPlan``), how a bucket is summed over ranks (``reduce``), and which part of the training state is
sharded. ``compile_options`` keeps XLA from merging the planned collectives again.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Number
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from .arguments import check_function, check_kind, check_leaves, is_number
from .communication import gloo
from .communication.axes import replica_axes, shard_axis
from .communication.backward_order import finishing_times, matmul_flops, zeros
from .communication.buckets import Bucket, BucketPlan, TensorSpec, bucket_width, dtype_bytes, plan_buckets
from .communication.collectives import Axis, all_reduce, axis_size
from .communication.compression import Compression, check_stateless, none
from .communication.reduction import ALL_REDUCE, Reduce, finish_reduction, start_reduction
from .communication.sharding import Cut
from .tree import like, named_leaves, tensor_specs

_COMPRESSIONS = "a compression, such as jaxddp.compression.bf16 or make_compression('bf16')"


class Precision(NamedTuple):
    """Dtypes of a strategy that shards parameters.

    Attributes:
        master_dtype: Of shards, optimizer state, and the gradients that the optimizer gets; that of the parameters
            given to ``Trainer.init`` if None.
        compute_dtype: Of the floating-point parameters that the loss function gets; ``master_dtype`` if None.
        gather_dtype: Of all-gathers of parameters; ``compute_dtype`` if None.
        reduce_dtype: Of sums of gradients over ranks; ``master_dtype`` if None.
    """

    master_dtype: Any = None
    compute_dtype: Any = None
    gather_dtype: Any = None
    reduce_dtype: Any = None


class Strategy(NamedTuple):
    """A way to train on several ranks with equal results.

    Attributes:
        name: Its key in ``STRATEGIES``.
        plan: Tensors in the order in which their gradients become ready ``->`` what to communicate.
        compression: Of gradients.
        reduce: ``ALL_REDUCE``; or ``REDUCE_SCATTER`` if each rank updates its shard of full parameters, which are
            gathered after the update.
        shards_optimizer_state: Whether each rank keeps and updates only its shard of the optimizer's state.
        shards_gradients: Whether a gradient that outlives its bucket is a shard.
        shards_params: Whether parameters, too, are shards between their uses.
        reduces_each_microbatch: Whether the gradients of each micro-batch are reduced, and the results added up; else
            the gradients are added up and reduced once.
        cut: ``(parameter, num_ranks) ->`` how it is cut into the shards that ranks update, None if it is not. Used if
            ``shards_optimizer_state``.
        shards_leaves: Whether a rank's shard of the optimizer's state is that of whole parameters (``zero/leaves.py``).
        precision: Used if ``shards_params``.
    """

    name: str
    plan: Callable[[Sequence[TensorSpec]], BucketPlan]
    compression: Compression = none
    reduce: Reduce = ALL_REDUCE
    shards_optimizer_state: bool = False
    shards_gradients: bool = False
    shards_params: bool = False
    reduces_each_microbatch: bool = False
    cut: Callable[[TensorSpec, int], Cut | None] = lambda tensor, num_ranks: Cut(tensor.shape, num_ranks)
    shards_leaves: bool = False
    precision: Precision = Precision()


STRATEGIES: dict[str, Callable[..., Strategy]] = {}  # read it from registry.py, which fills it


def register(factory: Callable[..., Strategy]) -> Callable[..., Strategy]:
    """Adds a factory to ``STRATEGIES`` under its own name; a decorator."""

    @functools.wraps(factory)
    def checked(*args: Any, **options: Any) -> Strategy:
        check_kind("compression", options.get("compression", none), Compression, _COMPRESSIONS)
        return factory(*args, **options)

    STRATEGIES[factory.__name__] = checked
    return checked


def sync_gradients(
    grads: Any,
    plan: BucketPlan,
    axis: str,
    *,
    denominator: jax.Array | float | None = None,
    compression: Compression = none,
) -> Any:
    """Sums gradients over the ranks of an axis as planned, and divides once.

    For use inside ``jax.shard_map`` or ``jax.pmap``, on gradients of the rank's own loss. Compile the caller with
    ``jaxddp.compile_options``, or XLA merges the collectives into one.

    ======== ==================== =================================
    tensor   on each rank, before on each rank, after
    ======== ==================== =================================
    gradient ``[shape]``, its own ``[shape]``, sum / denominator
    buffer   ``[bucket]``         ``[bucket]``, equal on all ranks
    ======== ==================== =================================

    Args:
        grads: A tree of gradients.
        plan: What to send and what is constant, by the leaves' paths; ``plan_gradients`` makes it. On one rank any
            plan will do, since nothing is sent.
        axis: Name of the mesh axis.
        denominator: What the sum is divided by: the number of ranks when None, which gives the mean.
        compression: Of the gradients; must be stateless.

    Returns:
        A tree like ``grads``.

    Raises:
        ValueError: If the plan names a tensor that ``grads`` does not hold, or the other way round, the compression has
            state, or an argument is of another kind.
    """
    check_leaves("grads", named_leaves(grads))
    check_kind("plan", plan, BucketPlan, "a BucketPlan, as plan_gradients gives it")
    check_kind("compression", compression, Compression, _COMPRESSIONS)
    if denominator is not None and not isinstance(denominator, jax.Array):
        if not is_number(denominator) or not 0 < denominator < math.inf:
            raise ValueError(f"denominator (={denominator!r}) must be a positive finite number, an array, or None")
    check_stateless(compression, "in sync_gradients: use a Trainer, which carries its state from step to step")
    num_ranks = axis_size(axis)
    denominator = num_ranks if denominator is None else denominator
    reduction, _ = start_reduction(grads, plan, axis, ALL_REDUCE, compression, denominator=denominator)
    if num_ranks > 1 and compression.sends:
        # A plan may meet other gradients than it was made for. XLA drops the reductions of those that are constant.
        constants = {name: grad for name, grad in named_leaves(grads).items() if name in reduction.unsent}
        unsent = {name: _sum_if_not_constant(grad, axis) for name, grad in constants.items()}
        reduction = reduction._replace(unsent=unsent)
    return like(grads, finish_reduction(reduction, plan, num_ranks, ALL_REDUCE, denominator).grads)


def _sum_if_not_constant(grad: jax.Array, axis: str) -> jax.Array:
    """Sums over ranks what XLA drops the sum of if it is constant, which it knows of two elements and more."""
    if grad.size != 1:
        return all_reduce(grad, axis)
    return all_reduce(jnp.broadcast_to(grad.reshape(1), 2), axis)[0].reshape(grad.shape)


def plan_gradients(strategy: Strategy, grad_fn: Callable[..., Any], *args: Any) -> BucketPlan:
    """Plans the communication of gradients in the order in which their computation finishes them.

    Args:
        strategy: How gradients are communicated.
        grad_fn: One rank's gradients, such as ``jax.grad(loss_fn)``; traced, not run.
        *args: Its arguments on one rank; arrays or ``jax.ShapeDtypeStruct``.

    Returns:
        The plan, for ``sync_gradients``.

    Raises:
        ValueError: If ``grad_fn`` uses a mesh axis that is not bound.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss_fn(params, x):
        ...     return jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 1)), "unused": jnp.ones(5)}
        >>> from jaxddp import overlapped
        >>> plan = plan_gradients(overlapped(), jax.grad(loss_fn), params, jnp.ones((4, 2)))
        >>> plan.names, plan.constants
        (('b', 'a'), ('unused',))
    """
    check_kind("strategy", strategy, Strategy, "a strategy, such as jaxddp.bucketed()")
    check_function("grad_fn", grad_fn)
    arrays = {name: leaf for name, leaf in named_leaves(args).items() if not isinstance(leaf, Number)}
    check_leaves("grad_fn's argument", arrays)
    try:
        trace = trace_gradients(grad_fn, *args)
    except NameError as error:
        if "unbound axis" not in str(error):
            raise
        raise ValueError(
            "grad_fn must not use a mesh axis here, where none is bound: call plan_gradients inside jax.shard_map, or"
            " jaxddp.value_and_grad"
        ) from error
    return plan_trace(strategy, trace)


def plan_trace(strategy: Strategy, trace: GradientTrace, param_dtypes: Mapping[str, str] | None = None) -> BucketPlan:
    """Plans the communication of the gradients of a traced backward pass.

    Args:
        strategy: How gradients are communicated.
        trace: Of the backward pass on one rank.
        param_dtypes: In which updated parameters are gathered, by name; None: those of their gradients.

    Returns:
        The plan.
    """
    plan = replace(strategy.plan(trace.tensors), constants=tuple(tensor.name for tensor in trace.constants))
    if strategy.reduce is ALL_REDUCE:
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
    """

    tensors: tuple[TensorSpec, ...]
    constants: tuple[TensorSpec, ...]
    program: core.ClosedJaxpr
    outputs: tuple[int, ...]
    constant_outputs: tuple[int, ...]

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
    return GradientTrace(tensors, tuple(constants.values()), program, outputs, tuple(constants))


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


class Planned(NamedTuple):
    """A planned collective.

    Attributes:
        kind: As in a compiled program.
        num_bytes: Of the full buffer on the wire.
        axes: The mesh axes along which ranks take part.
    """

    kind: str
    num_bytes: int
    axes: tuple[str, ...]


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
    planned = planned_along("data", strategy, plan, num_ranks, num_ranks, platform, num_microbatches)
    return [(one.kind, one.num_bytes) for one in planned]


def planned_along(
    axis: Axis,
    strategy: Strategy,
    plan: BucketPlan,
    num_ranks: int,
    num_shards: int,
    platform: str,
    num_microbatches: int,
) -> list[Planned]:
    """Lists what a plan communicates in one step, and along which mesh axes.

    Args:
        axis: Name of the mesh axis of the ranks, or of several.
        strategy: The plan's strategy.
        plan: The plan.
        num_ranks: Number of ranks along all axes.
        num_shards: Number of ranks along the shard axis.
        platform: What it is compiled for.
        num_microbatches: Parts of each rank's batch.

    Returns:
        The collectives in launch order.
    """
    if num_ranks == 1 or not strategy.compression.sends:
        return []
    is_scattered = strategy.reduce is not ALL_REDUCE
    shards, replicas = (shard_axis(axis),), replica_axes(axis)

    def num_elements(bucket: Bucket) -> int:
        return num_shards * bucket_width(bucket, num_shards) if is_scattered else bucket.num_elements

    reductions = []
    for bucket in plan.buckets:
        for elements, dtype in strategy.compression.wire_buffers(bucket, num_elements(bucket)):
            num_bytes = wire_bytes(elements, dtype, platform)
            if not is_scattered:
                reductions.append(Planned(strategy.reduce.kind, num_bytes, (*replicas, *shards)))
                continue
            scatter = planned_exchange("reduce-scatter", elements, dtype, num_shards, platform)
            reductions.append(Planned(*scatter, shards))
            if replicas:
                reductions.append(Planned("all-reduce", num_bytes // num_shards, replicas))
    gathers = [
        Planned(*planned_exchange("all-gather", num_elements(one), one.dtype, num_shards, platform), shards)
        for one in plan.gathers
    ]
    return reductions * (num_microbatches if strategy.reduces_each_microbatch else 1) + gathers


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
    compiled, width = gloo.kind_of(kind, num_ranks, platform), dtype_bytes(str(dtype))
    if compiled == "all-reduce":
        return compiled, gloo.swapped_bytes(num_elements // num_ranks, width)
    return compiled, wire_bytes(num_elements, dtype, platform) if kind == "reduce-scatter" else num_elements * width


def wire_bytes(num_elements: int, dtype: Any, platform: str) -> int:
    """Counts the bytes of a buffer that is summed: XLA's collectives for CPUs convert bfloat16 to float32.

    Args:
        num_elements: Of the buffer.
        dtype: Of the buffer.
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Returns:
        Bytes.

    Example:
        >>> wire_bytes(8, "bfloat16", "cpu"), wire_bytes(8, "bfloat16", "gpu")
        (32, 16)
    """
    name = str(dtype)
    return num_elements * (4 if (platform, name) == ("cpu", "bfloat16") else dtype_bytes(name))
