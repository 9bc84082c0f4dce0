"""The contract of a strategy, the registry, and the one function that carries a plan out.

The data-parallel strategies differ in two decisions only, and both stand in their ``BucketPlan``: which gradients
travel together, and whether the first collective waits for the whole backward. ``sync_gradients`` turns the plan
into collectives; the compile options of ``xla.py`` keep XLA from merging them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .buckets import BucketPlan, TensorSpec, pack, unpack
from .compression import Compression, none
from .order import finishing_times, matmul_flops
from .scopes import SYNC_SCOPE
from .tree import named_leaves, tensor_specs


class Strategy(NamedTuple):
    """A way to keep replicas equal.

    Attributes:
        name: Its key in ``STRATEGIES``.
        plan: Tensors in the order in which their gradients become ready ``->`` what to communicate.
        compression: What travels.
        tune: When gradients are ready, as a ``tuning.StepTiming`` ``->`` the strategy to use; None if it is this one.
    """

    name: str
    plan: Callable[[Sequence[TensorSpec]], BucketPlan]
    compression: Compression = none
    tune: Callable[[Any], Strategy] | None = None


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
        compression: What travels.

    Returns:
        A tree like ``grads``.

    Raises:
        ValueError: If the plan names a tensor that ``grads`` does not hold, or the other way round.
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

    The norm also keeps the optimizer in step with the network. What a compiler may do first is what depends on
    nothing else, so the order is made one of data: no bucket is divided before every bucket is packed, which is when
    the backward ends, and none before the squares of the bucket launched before it are summed. XLA fuses that sum
    with the bucket's update; so updates follow the buckets as they arrive, and run under the reductions still to come.

        packed[k]  = pack(grads of bucket k)                         as soon as its last gradient is ready
        total[k]   = sum over ranks of packed[k]                     in flight until it is needed
        mean[k]    = total[k] / denominator                          after packed[0 ... n] and squares[k-1]
        squares[k] = squares[k-1] + sum(mean[k]^2)                   norm = sqrt(squares[n])

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
    ready = named_leaves(grads)
    names = list(ready)
    planned = set(plan.names)
    num_ranks = lax.axis_size(axis)
    if missing := sorted(planned - set(names)):
        raise ValueError(f"plan names {missing[0]!r}, which grads does not hold: plan and grads must be of one model")
    if (unknown := sorted(set(names) - planned - set(plan.constants))) and num_ranks > 1:
        raise ValueError(f"grads holds {unknown[0]!r}, which plan does not name: plan and grads must be of one model")
    divisor = num_ranks if denominator is None else denominator

    def divide(total: jax.Array, zero: jax.Array | int = 0) -> jax.Array:
        # The one division: by the number of ranks and micro-batches, or by the total weight.
        return (total / (divisor + zero)).astype(total.dtype)

    with jax.named_scope(SYNC_SCOPE):
        if plan.after_backward:
            ready = lax.optimization_barrier(ready)
        means = {name: divide(grad * num_ranks) for name, grad in ready.items() if name not in planned}
        squares = sum_of_squares(means.values())
        totals, zero = [], jnp.int32(0)
        for index, bucket in enumerate(plan.buckets):
            # XLA reduces buckets that it can prove equal, such as the biases of parallel branches, only once. A barrier
            # with a number makes them differ; the number comes out unknown to XLA and is used, or it would be dropped.
            buffer, mark = lax.optimization_barrier((pack(bucket, ready), jnp.int32(index)))
            totals.append(compression.sum_over_ranks(buffer, axis))
            if not _is_varying(mark):  # under check_vma, on jax 0.10, outputs must not take it in
                zero += mark - index
        if plan.after_backward:
            totals = lax.optimization_barrier(totals)
        for bucket, total in zip(plan.buckets, totals, strict=True):
            total, squares = lax.optimization_barrier((total, squares))  # noqa: PLW2901
            mean = unpack(bucket, divide(total, zero))
            squares += sum_of_squares(mean.values())
            means.update(mean)
    return jax.tree.unflatten(jax.tree.structure(grads), [means[name] for name in names]), jnp.sqrt(squares)


def sum_of_squares(arrays: Iterable[jax.Array]) -> jax.Array:
    """Sums the squares of all elements of some arrays, at least in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)))) for leaf in arrays]
    return sum(squares, start=jnp.zeros(()))


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
    trace = trace_gradients(grad_fn, *args)
    plan = strategy.plan(trace.tensors)
    return replace(plan, constants=plan.constants + trace.constants)


class GradientTrace(NamedTuple):
    """What the trace of a backward pass tells of its gradients.

    Attributes:
        tensors: Those that depend on something, in the order in which they are finished.
        flops_before: Share of the trace's matrix products done before each is finished.
        constants: Names of those that depend on nothing.
    """

    tensors: tuple[TensorSpec, ...]
    flops_before: tuple[float, ...]
    constants: tuple[str, ...]


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
    constants = tuple(spec.name for spec in specs if spec not in set(tensors))
    return GradientTrace(tensors, tuple((flops[place] or 0.0) / total for *_, place in ready), constants)


def planned_collectives(
    strategy: Strategy, plan: BucketPlan, num_ranks: int, platform: str = "gpu"
) -> list[tuple[str, int]]:
    """Lists what a plan communicates in one step.

    Args:
        strategy: The plan's strategy.
        plan: The plan.
        num_ranks: Number of ranks; one rank communicates nothing.
        platform: What it is compiled for; XLA sums bfloat16 as float32 on CPUs.

    Returns:
        ``(kind, bytes of the full buffer on the wire)`` in launch order.
    """
    if num_ranks == 1 or not strategy.compression.sends:
        return []
    widened = "bfloat16" if platform == "cpu" else None
    return [("all-reduce", bucket.num_bytes * (2 if bucket.dtype == widened else 1)) for bucket in plan.buckets]


def _is_varying(x: jax.Array) -> bool:
    kind = jax.typeof(x)
    return bool(kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma)
