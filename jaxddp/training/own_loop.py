"""For a loop of one's own, inside ``jax.shard_map``: mean gradients, sharded optimizers, a ``jit`` that keeps plans."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..arguments import check_kind, check_optimizer, check_positive
from ..communication.buckets import Bucket, BucketMb, BucketPlan, plan_buckets
from ..communication.collectives import all_reduce, as_varying, broadcast, varying
from ..communication.hooks import Hook
from ..communication.reduction import check_grads, divide as divide_total
from ..communication.traces import plan_trace, trace_gradients
from ..ddp import all_reduce_grads
from ..layout import whole
from ..loss import denominator, divide, partial_loss, refuse_derivative
from ..scopes import LOSS_SCOPE, SYNC_SCOPE
from ..strategy import Layout, Ranks, Strategy
from ..tree import like, named_leaves, tensor_specs
from ..zero.stages_1_and_2 import gather_shards, layout_shards, local_shards, reduce_scatter_grads
from .step import clip_to_norm, global_norm, sum_over_ranks
from .xla import compile_options

_DIFFERENTIATED = "results of value_and_grad must not be differentiated with check_vma=False: leave check_vma on"


def value_and_grad(
    loss_fn: Callable[..., Any], strategy: Strategy, axis: str = "data", *, has_aux: bool = False
) -> Callable[..., Any]:
    """Gives the loss and its gradient, averaged over the ranks of an axis.

    Call the function inside ``jax.shard_map``, and compile with ``jaxddp.jit``: XLA merges the collectives otherwise.
    Over other axes of the mesh nothing is summed but what autodiff sums. ``docs/training.md`` has an example.

    ======== ============================= ========================================
    tensor   on each rank of the axis      returned, equal on all ranks of the axis
    ======== ============================= ========================================
    params   ``[shape]``, equal on all     gradient ``[shape]``
    batch    ``[n, ...]``, its own         loss ``[]``
    ======== ============================= ========================================

    Args:
        loss_fn: ``(params, batch, ...)`` to the mean loss over this rank's examples, or to ``Weighted``; with
            ``has_aux`` to ``(loss, aux)``. Give it a key that differs by rank to draw noise that does.
        strategy: One that does not shard: ``naive``, ``flat``, ``overlapped`` or ``bucketed``.
        axis: Name of the mesh axis.
        has_aux: Whether the loss function returns auxiliary values, of the kinds that ``Trainer`` takes.

    Gives ``(params, batch, ...) -> (loss, gradients)``, with ``has_aux`` ``((loss, aux), gradients)``. Raises a
    ValueError if the strategy shards; where the function is called, if the loss is not a scalar, or the results are
    differentiated again without ``check_vma``.
    """
    check_kind("strategy", strategy, Strategy, "a strategy, such as jaxddp.bucketed()")
    check_kind("axis", axis, str, "the name of a mesh axis")
    if strategy.gathers_in_loss or strategy.plan(()).kind != "all-reduce":
        instead = "use a Trainer, or jax.grad and jaxddp.shard_optimizer"
        raise ValueError(f"strategy (={strategy.name!r}) must not shard in value_and_grad: {instead}")

    def on_rank(params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        def local_loss(params: Any, batch: Any) -> Any:
            # A mean that the loss took over ranks counts on each of them, as it does where check_vma is off.
            total, others = loss(params, (), batch, None)
            return as_varying(total, axis), others

        @jax.named_scope(LOSS_SCOPE)
        def local_grads(params: Any, batch: Any) -> Any:
            # Of parameters that vary over ranks, gradients are local. Of equal ones, autodiff would sum them.
            return jax.grad(local_loss, has_aux=True)(as_varying(params, axis), batch)

        num_ranks = lax.axis_size(axis)
        loss = partial_loss(lambda params, batch: loss_fn(params, batch, *args, **kwargs), has_aux)
        # A constant may still be another one on each process, which no trainer has compared here: it is sent.
        trace = trace_gradients(local_grads, params, batch, has_aux=True).with_constants_sent()
        plan = plan_trace(strategy, trace)
        plan = plan if num_ranks > 1 else replace(plan, buckets=())
        local, (parts, _) = trace(params, batch)
        parts = sum_over_ranks(parts, Ranks(axis, num_ranks, num_ranks))
        value, aux = divide(parts, num_ranks)
        divisor = denominator(parts.loss, num_ranks)
        grads = sync_gradients(local, plan, axis, denominator=divisor, hook=strategy.hook)
        result = (value, aux) if has_aux else value, grads
        if not varying(lax.axis_index(axis)):
            # Without check_vma, the derivative of a sum over ranks is that of one rank.
            result = jax.tree.map(
                lambda one: refuse_derivative(one, _DIFFERENTIATED) if jnp.issubdtype(one.dtype, jnp.inexact) else one,
                result,
            )
        return result if num_ranks > 1 else _as_equal(result, axis)

    return on_rank


def _as_equal(tree: Any, axis: str) -> Any:
    """What an only rank has, which has sent nothing: ``check_vma`` takes only what a collective gives as equal."""
    return jax.tree.map(lambda leaf: broadcast(leaf, axis) if axis in varying(leaf) else leaf, tree)


def sync_gradients(
    grads: Any, plan: BucketPlan, axis: str, *, denominator: jax.Array | float | None = None, hook: Hook | None = None
) -> Any:
    """Sums a tree of gradients over the ranks of an axis as planned, and divides once; gives a tree like it.

    For use inside ``jax.shard_map`` or ``jax.pmap``, compiled with ``jaxddp.jit``, or XLA merges the collectives.

    Args:
        grads: A tree of gradients of the rank's own loss.
        plan: What to send and what is constant, by the leaves' paths; ``plan_gradients`` makes it.
        axis: Name of the mesh axis.
        denominator: What the sum is divided by: the number of ranks when None, which gives the mean.
        hook: How a bucket is summed, as ``bucketed`` takes it.

    Raises a ValueError if plan and gradients differ in shapes.
    """
    num_ranks, ready = lax.axis_size(axis), named_leaves(grads)
    check_grads(ready, plan, axis)
    divisor = num_ranks if denominator is None else denominator
    axes = {name: varying(ready[name]) for name in plan.names}
    unsent = {name: grad for name, grad in ready.items() if name not in axes}
    if num_ranks > 1:
        # A plan may meet other gradients than it was made for. XLA drops the reductions of those that are constant.
        with jax.named_scope(SYNC_SCOPE):
            unsent = {name: _sum_if_not_constant(grad, axis) for name, grad in unsent.items()}
    means = {name: divide_total(total, divisor) for name, total in unsent.items()}
    for alike in dict.fromkeys(axes.values()):  # joined with what varies over another axis, it would vary too
        parts = [[tensor for tensor in one.tensors if axes[tensor.name] == alike] for one in plan.buckets]
        part = replace(plan, buckets=tuple(Bucket(tuple(tensors)) for tensors in parts if tensors))
        sent = {name: ready[name] for name in part.names}
        means |= all_reduce_grads(Ranks(axis, num_ranks, num_ranks), hook, sent, part, divisor).grads
    return like(grads, means)


def _sum_if_not_constant(grad: jax.Array, axis: str) -> jax.Array:
    """Sums over ranks what XLA drops the sum of if it is constant, which it knows of two elements and more."""
    if grad.size != 1:
        return all_reduce(grad, axis)
    return all_reduce(jnp.broadcast_to(grad.reshape(1), 2), axis)[0].reshape(grad.shape)


def plan_gradients(strategy: Strategy, grad_fn: Callable[..., Any], *args: Any) -> BucketPlan:
    """Plans the communication of gradients, for ``sync_gradients``, in the order in which they are computed.

    ``grad_fn``, such as ``jax.grad(loss_fn)``, is traced with its ``args``, arrays or ``jax.ShapeDtypeStruct``; call it
    inside ``jax.shard_map`` if it uses a mesh axis.
    """
    check_kind("strategy", strategy, Strategy, "a strategy, such as jaxddp.bucketed()")
    return plan_trace(strategy, trace_gradients(grad_fn, *args))


def shard_optimizer(
    optimizer: optax.GradientTransformation,
    axis: str,
    *,
    bucket_mb: BucketMb = "default",
    max_grad_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that each rank keeps and updates 1/N of its state: ZeRO stage 1 in an optax transformation.

    ``docs/zero.md`` has an example.

    ============ ========================= ===========================
    tensor       ``update`` takes          ``update`` returns
    ============ ========================= ===========================
    gradient     ``[shape]``, this rank's
    state        ``[..., c]``, this rank's ``[..., c]``, this rank's
    update                                 ``[shape]``, equal on all
    ============ ========================= ===========================

    Call ``init`` and ``update`` inside ``jax.shard_map`` or ``jax.pmap``; ``sharded_specs`` gives the state's specs.
    Compile the caller with ``jaxddp.jit(..., jaxddp.zero1())``, or XLA merges the buckets.

    Args:
        optimizer: Element-wise; ``init`` raises a ValueError if it is not.
        axis: Name of the mesh axis.
        bucket_mb: Cap of the buckets, which hold gradients in the reverse order of the tree; see ``plan_buckets``.
        max_grad_norm: Of the averaged gradient; where other axes split parameters, of each part by itself.
    """
    check_optimizer(optimizer)
    check_kind("axis", axis, str, "the name of a mesh axis")
    if max_grad_norm is not None:
        check_positive("max_grad_norm", max_grad_norm)
    optimizer = optax.with_extra_args_support(optimizer)

    def layout_of(tree: Any) -> Layout:
        num_ranks = lax.axis_size(axis)
        return layout_shards(whole(tree), optimizer, Ranks(axis, num_ranks, num_ranks))

    def shards_of(tree: Any, layout: Layout) -> Any:
        return like(tree, local_shards(named_leaves(tree), layout.cuts, axis))

    def init(params: Any) -> Any:
        layout = layout_of(params)
        return layout.optimizer.init(shards_of(params, layout))

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        layout, ready, num_ranks = layout_of(grads), named_leaves(grads), lax.axis_size(axis)
        buckets = plan_buckets(reversed(tensor_specs(ready).values()), bucket_mb).buckets
        plan = BucketPlan(buckets if num_ranks > 1 else (), gathers=buckets, kind="reduce-scatter")
        check_grads(ready, plan, axis)
        means = reduce_scatter_grads(ready, plan, layout, num_ranks)
        shards = means.grads
        if max_grad_norm is not None:
            shards = clip_to_norm(shards, global_norm(means, layout), max_grad_norm)
        held = None if params is None else shards_of(params, layout)
        updates, state = optimizer.update(like(grads, shards), state, held, **extra_args)
        full = like(grads, gather_shards(named_leaves(updates), plan, layout.cuts, axis))
        return full if num_ranks > 1 else _as_equal(full, axis), state

    return optax.GradientTransformationExtraArgs(init, update)


def sharded_specs(optimizer: optax.GradientTransformation, params: Any, *, num_ranks: int, axis: str) -> Any:
    """The partition specs of the state of ``shard_optimizer``, for ``in_specs`` and ``out_specs``; a tree like it.

    ``optimizer`` is the one that was wrapped, and ``params`` a tree of full arrays or ``jax.ShapeDtypeStruct``.
    """
    found = layout_shards(whole(params), optimizer, Ranks(axis, num_ranks, num_ranks))
    return jax.tree.map(lambda leaf: leaf.rank_spec(axis), found.opt_state)


def jit(function: Callable[..., Any], strategy: Strategy, *, platform: str | None = None, **options: Any) -> Any:
    """Compiles as ``jax.jit`` does, with the options that keep the plan of a strategy; raises as ``compile_options``.

    The platform is that of JAX's default device if None. ``compiler_options`` are added to the strategy's.
    """
    compiler_options = compile_options(strategy, platform or jax.default_backend())
    compiler_options |= options.pop("compiler_options", None) or {}
    return jax.jit(function, compiler_options=compiler_options, **options)
