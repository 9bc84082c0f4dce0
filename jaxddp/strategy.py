"""The contract of a strategy, the registry, and the one function that carries a plan out.

The data-parallel strategies differ in two decisions only, and both stand in their ``BucketPlan``: which gradients
travel together, and whether the first collective waits for the whole backward. ``sync_gradients`` turns the plan
into collectives; the compile options of ``xla.py`` keep XLA from merging them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from .buckets import BucketPlan, TensorSpec, pack, unpack
from .compression import Compression, none
from .tree import named_leaves

SYNC_SCOPE = "jaxddp.sync"


class Strategy(NamedTuple):
    """A way to keep replicas equal.

    Attributes:
        name: Its key in ``STRATEGIES``.
        plan: Tensors in the order in which their gradients become ready ``->`` what to communicate.
        compression: What travels.
    """

    name: str
    plan: Callable[[Sequence[TensorSpec]], BucketPlan]
    compression: Compression = none


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
        grads: A tree of gradients. Leaves that the plan does not name are taken to be constant, hence equal on all
            ranks: their sum needs no communication.
        plan: Names are the leaves' paths, as ``jaxddp.named_leaves`` spells them.
        axis: Name of the mesh axis.
        denominator: What the sum is divided by: the number of ranks when None, which gives the mean.
        compression: What travels.

    Returns:
        A tree like ``grads``.

    Raises:
        ValueError: If the plan names a tensor that ``grads`` does not hold.
    """
    ready = named_leaves(grads)
    names = list(ready)
    planned = set(plan.names)
    missing = sorted(planned - set(names))
    if missing:
        raise ValueError(f"plan names {missing[0]!r}, which grads does not hold: plan and grads must be of one model")
    num_ranks = lax.axis_size(axis)
    if denominator is None:
        denominator = num_ranks
    with jax.named_scope(SYNC_SCOPE):
        if plan.after_backward:
            ready = lax.optimization_barrier(ready)
        summed = {name: grad * num_ranks for name, grad in ready.items() if name not in planned}
        for bucket in plan.buckets:
            total = compression.sum_over_ranks(pack(bucket, ready), axis)
            summed.update(unpack(bucket, total))
    # The one division: by the number of ranks and micro-batches, or by the total weight.
    means = [(summed[name] / denominator).astype(summed[name].dtype) for name in names]
    return jax.tree.unflatten(jax.tree.structure(grads), means)


def planned_collectives(strategy: Strategy, plan: BucketPlan, num_ranks: int) -> list[tuple[str, int]]:
    """Lists what a plan communicates in one step.

    Args:
        strategy: The plan's strategy.
        plan: The plan.
        num_ranks: Number of ranks; one rank communicates nothing.

    Returns:
        ``(kind, bytes of the full buffer)`` in launch order.
    """
    if num_ranks == 1 or not strategy.compression.sends:
        return []
    return [("all-reduce", bucket.num_bytes) for bucket in plan.buckets]
