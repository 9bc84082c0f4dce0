"""ZeRO stage 1 as an optax transformation, for your own training loop inside ``shard_map`` or ``pmap``.

It takes each rank's local gradients and returns full updates: a reduce-scatter, the wrapped optimizer on this rank's
shards, an all-gather. It replaces the all-reduce of the gradients, and sends the same bytes.
"""

from typing import Any

import jax
import optax
from jax import lax

from ..arguments import check_kind, check_optimizer, check_positive
from ..communication.buckets import BucketMb, BucketPlan, plan_buckets
from ..communication.collectives import varying
from ..communication.reduction import check_grads
from ..layout import whole
from ..strategy import Layout, Ranks
from ..tree import like, named_leaves, tensor_specs
from ..zero.stages_1_and_2 import gather_shards, layout_shards, local_shards, reduce_scatter_grads
from .step import clip_to_norm, global_norm


def shard_optimizer(
    optimizer: optax.GradientTransformation,
    axis: str,
    *,
    bucket_mb: BucketMb = "default",
    max_grad_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that each rank keeps and updates 1/N of its state.

    ============ ========================= ===========================
    tensor       ``update`` takes          ``update`` returns
    ============ ========================= ===========================
    gradient     ``[shape]``, this rank's
    state        ``[..., c]``, this rank's ``[..., c]``, this rank's
    update                                 ``[shape]``, equal on all
    ============ ========================= ===========================

    Call ``init`` and ``update`` inside ``jax.shard_map`` or ``jax.pmap``; ``sharded_specs`` gives the state's specs.
    Give ``update`` gradients that are not yet summed over ranks: it averages them. Compile the caller with
    ``jaxddp.compile_options(jaxddp.zero1(), platform)``, or XLA merges the buckets.

    Args:
        optimizer: Element-wise.
        axis: Name of the mesh axis.
        bucket_mb: Cap of the buckets, which hold gradients in the reverse order of the tree; see ``plan_buckets``.
        max_grad_norm: Clips the norm of the averaged gradient to this value; where parameters are split over other axes
            as well, that of each part by itself.

    Returns:
        The transformation. Its ``init`` raises ``ValueError`` if the optimizer is not element-wise.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> import jaxddp
        >>> mesh = jaxddp.data_mesh(4)
        >>> params = {"w": jnp.ones(6)}
        >>> optimizer = shard_optimizer(optax.adam(0.1), "data")
        >>> specs = sharded_specs(optax.adam(0.1), params, num_ranks=4, axis="data")
        >>> def step(params, x):
        ...     state = optimizer.init(params)
        ...     updates, state = optimizer.update({"w": x * params["w"]}, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), specs))
        >>> params, state = run(params, jnp.arange(4.0))
        >>> state[0].mu["w"].shape, state[0].mu["w"].addressable_shards[0].data.shape
        ((8,), (2,))
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
        full = gather_shards(named_leaves(updates), plan, layout.cuts, axis)
        if num_ranks == 1:  # under check_vma, only what comes out of a collective leaves shard_map under P()
            full = {name: lax.psum(leaf, axis) if varying(leaf) else leaf for name, leaf in full.items()}
        return like(grads, full), state

    return optax.GradientTransformationExtraArgs(init, update)


def sharded_specs(optimizer: optax.GradientTransformation, params: Any, *, num_ranks: int, axis: str) -> Any:
    """The partition specs of the state of ``shard_optimizer``, for ``in_specs`` and ``out_specs``; a tree like it.

    ``optimizer`` is the one that was wrapped, and ``params`` a tree of full arrays or ``jax.ShapeDtypeStruct``. Raises
    a ValueError if the optimizer is not element-wise.
    """
    found = layout_shards(whole(params), optimizer, Ranks(axis, num_ranks, num_ranks))
    return jax.tree.map(lambda leaf: leaf.rank_spec(axis), found.opt_state)
