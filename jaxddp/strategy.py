"""The contract of a strategy, the registry, and the one function that carries a plan out.

The data-parallel strategies differ in two decisions only, and both stand in their ``BucketPlan``: which gradients
travel together, and whether the first collective waits for the whole backward. ``sync_gradients`` turns the plan
into collectives; the compile options of ``xla.py`` keep XLA from merging them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .communication.backward_order import finishing_times, matmul_flops
from .communication.compression import Compression, check_stateless, none
from .communication.gloo import kind_of_scatter
from .communication.reduction import ALL_REDUCE, REDUCE_SCATTER, Reduce, finish_reduction, start_reduction
from .communication.sharding import Cut
from .planning.buckets import Bucket, BucketPlan, TensorSpec, bucket_width, dtype_bytes, plan_buckets
from .tree import like, named_leaves, tensor_specs


class Precision(NamedTuple):
    """Dtypes of a strategy whose parameters are shards; None leaves the choice to the one before it.

    Attributes:
        master_dtype: Of shards, and so of the optimizer's state and of the gradients it gets; that of the parameters
            given to ``Trainer.init``.
        compute_dtype: In which the loss function gets its floating parameters; the master's.
        gather_dtype: In which parameters travel; that of computing.
        reduce_dtype: In which gradients are summed over ranks; the master's.
    """

    master_dtype: Any = None
    compute_dtype: Any = None
    gather_dtype: Any = None
    reduce_dtype: Any = None


class Strategy(NamedTuple):
    """A way to keep replicas equal.

    Attributes:
        name: Its key in ``STRATEGIES``.
        plan: Tensors in the order in which their gradients become ready ``->`` what to communicate.
        compression: What travels.
        tune: When gradients are ready, as a ``tuning.StepTiming`` ``->`` the strategy to use; None if it is this one.
        stage: What is sharded: 0 nothing, 1 the optimizer's state, 2 also gradients that outlive their bucket, 3 also
            parameters.
        accumulate: What the micro-batches of a step add up: ``"full"`` gradients, sent once, or ``"shards"``, sent by
            each micro-batch.
        cut: ``(parameter, num_ranks) ->`` how it is cut into what each rank updates; None if it stays whole. Not asked
            at stage 0.
        precision: At stage 3.
    """

    name: str
    plan: Callable[[Sequence[TensorSpec]], BucketPlan]
    compression: Compression = none
    tune: Callable[[Any], Strategy] | None = None
    stage: int = 0
    accumulate: Literal["full", "shards"] = "full"
    cut: Callable[[TensorSpec, int], Cut | None] = lambda tensor, num_ranks: Cut(tensor.shape, num_ranks)
    precision: Precision = Precision()

    @property
    def reduce(self) -> Reduce:
        """How the buckets of its plan travel."""
        return REDUCE_SCATTER if self.stage in (1, 2) else ALL_REDUCE


STRATEGIES: dict[str, Callable[..., Strategy]] = {}


def register(factory: Callable[..., Strategy]) -> Callable[..., Strategy]:
    """Adds a factory to ``STRATEGIES`` under its own name; a decorator."""
    STRATEGIES[factory.__name__] = factory
    return factory


def make_strategy(name: str, **options: Any) -> Strategy:
    """Builds a strategy by name.

    Args:
        name: A key of ``STRATEGIES``.
        **options: For its factory.

    Returns:
        The strategy.

    Raises:
        ValueError: If there is no strategy of that name.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](**options)


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
    buffer   ``[bucket]``         ``[bucket]``, the same everywhere
    ======== ==================== =================================

    Args:
        grads: A tree of gradients.
        plan: What to send and what is constant, by the leaves' paths; ``plan_gradients`` makes it. On one rank any
            plan will do, since nothing is sent.
        axis: Name of the mesh axis.
        denominator: What the sum is divided by: the number of ranks when None, which gives the mean.
        compression: What travels; none that remembers.

    Returns:
        A tree like ``grads``.

    Raises:
        ValueError: If the plan names a tensor that ``grads`` does not hold, or the other way round, or the compression
            needs a memory from step to step.
    """
    return sync_with_norm(grads, plan, axis, denominator=denominator, compression=compression)[0]


def sync_with_norm(
    grads: Any,
    plan: BucketPlan,
    axis: str,
    *,
    denominator: jax.Array | float | None = None,
    compression: Compression = none,
) -> tuple[Any, jax.Array]:
    """Does what ``sync_gradients`` does, and gives the global norm of the result.

    Args:
        grads: As for ``sync_gradients``, and so are the others.
        plan: What to send.
        axis: Name of the mesh axis.
        denominator: What the sum is divided by.
        compression: What travels.

    Returns:
        The tree like ``grads``, and its Euclidean norm, summed at least in float32.

    Raises:
        ValueError: As ``sync_gradients``.
    """
    check_stateless(compression, "in sync_gradients: use a Trainer, which carries it from step to step")
    num_ranks = lax.axis_size(axis)
    sums, _ = start_reduction(grads, plan, axis, ALL_REDUCE, compression)
    means, squares, _ = finish_reduction(
        sums, plan, num_ranks, ALL_REDUCE, num_ranks if denominator is None else denominator
    )
    return like(grads, means), jnp.sqrt(squares)


def plan_gradients(strategy: Strategy, grad_fn: Callable[..., Any], *args: Any) -> BucketPlan:
    """Plans the communication of gradients in the order in which their computation finishes them.

    Args:
        strategy: How gradients are communicated.
        grad_fn: One rank's gradients, such as ``jax.grad(loss_fn)``; traced, not run.
        *args: Its arguments on one rank; arrays or ``jax.ShapeDtypeStruct``.

    Returns:
        The plan, for ``sync_gradients``.

    Example:
        >>> def loss_fn(params, x):
        ...     return jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 1)), "unused": jnp.ones(5)}
        >>> from jaxddp import overlapped
        >>> plan = plan_gradients(overlapped(), jax.grad(loss_fn), params, jnp.ones((4, 2)))
        >>> plan.names, plan.constants
        (('b', 'a'), ('unused',))
    """
    return plan_trace(strategy, trace_gradients(grad_fn, *args))


def plan_trace(strategy: Strategy, trace: GradientTrace) -> BucketPlan:
    """Plans what a traced backward pass is to communicate.

    Args:
        strategy: How gradients are communicated.
        trace: Of the backward pass on one rank.

    Returns:
        The plan.
    """
    plan = replace(strategy.plan(trace.tensors), constants=tuple(tensor.name for tensor in trace.constants))
    if strategy.reduce is ALL_REDUCE:
        return plan
    # A gradient of zero is not sent; the parameter, which decay and moments still move, is.
    return replace(plan, gathers=plan.buckets + plan_buckets(trace.constants, None).buckets)


class GradientTrace(NamedTuple):
    """What the trace of a backward pass tells of its gradients.

    Attributes:
        tensors: Those that depend on something, in the order in which they are finished.
        flops_before: Share of the trace's matrix products done before each is finished.
        constants: Those that depend on nothing.
    """

    tensors: tuple[TensorSpec, ...]
    flops_before: tuple[float, ...]
    constants: tuple[TensorSpec, ...]


def trace_gradients(grad_fn: Callable[..., Any], *args: Any) -> GradientTrace:
    """Traces the computation of gradients.

    Args:
        grad_fn: As for ``plan_gradients``.
        *args: Its arguments on one rank.

    Returns:
        The order of the gradients.
    """
    traced, grads = jax.make_jaxpr(grad_fn, return_shape=True)(*args)
    specs = list(tensor_specs(named_leaves(grads)).values())
    times = finishing_times(traced)
    flops = finishing_times(traced, matmul_flops)
    total = max((time for time in flops if time is not None), default=0.0) or 1.0
    ready = sorted(
        (time, -place, place) for place, time in enumerate(times) if time is not None and specs[place].num_elements > 0
    )
    tensors = tuple(specs[place] for *_, place in ready)
    sent = set(tensors)
    constants = tuple(spec for spec in specs if spec not in sent)
    return GradientTrace(tensors, tuple((flops[place] or 0.0) / total for *_, place in ready), constants)


def planned_collectives(
    strategy: Strategy, plan: BucketPlan, num_ranks: int, platform: str = "gpu", *, num_microbatches: int = 1
) -> list[tuple[str, int]]:
    """Lists what a plan communicates in one step.

    Args:
        strategy: The plan's strategy.
        plan: The plan.
        num_ranks: Number of ranks; one rank communicates nothing.
        platform: What it is compiled for; bfloat16 travels as float32 on CPUs.
        num_microbatches: Parts of each rank's batch.

    Returns:
        ``(kind, bytes of the full buffer on the wire)`` in launch order.
    """
    if num_ranks == 1 or not strategy.compression.sends:
        return []
    route = strategy.reduce
    kind = kind_of_scatter(platform) if route.kind == "reduce-scatter" else route.kind

    def num_elements(bucket: Bucket) -> int:
        return bucket.num_elements if route is ALL_REDUCE else num_ranks * bucket_width(bucket, num_ranks)

    sums = [
        (kind, wire_bytes(elements, dtype, platform))
        for bucket in plan.buckets
        for elements, dtype in strategy.compression.wire_buffers(bucket, num_elements(bucket))
    ]
    times = num_microbatches if strategy.accumulate == "shards" else 1
    gathers = [("all-gather", wire_bytes(num_elements(bucket), bucket.dtype, platform)) for bucket in plan.gathers]
    return sums * times + gathers


def wire_bytes(num_elements: int, dtype: Any, platform: str) -> int:
    """Counts the bytes of a buffer as it travels: XLA's collectives for CPUs take bfloat16 as float32.

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
