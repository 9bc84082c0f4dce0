"""ZeRO stages 1 and 2: the optimizer's state is sharded, and with stage 2 the gradients that outlive a backward.

    ================ ============================== ==============================
    tensor           on each rank                   bytes on each rank, AdamW, fp32
    ================ ============================== ==============================
    parameter        ``[shape]``                    4 Psi
    gradient         ``[shape]``, then its shard    4 Psi, then 4 Psi / N
    moments          shards                         8 Psi / N
    ================ ============================== ==============================

    g[r]  = row r of the sum over ranks of pack(gradients) / N      reduce-scatter, bucket by bucket as they fill
    p[r]  = shard r of the parameters                               a slice, no communication
    p[r] += optimizer(g[r], state[r], p[r])                         state[r] is on rank r alone
    p     = unpack(p[0] ... p[N-1])                                 all-gather, bucket by bucket

Over A micro-batches, stage 1 adds up full gradients and reduces them once. Stage 2 reduce-scatters those of each
micro-batch and adds up shards. Calls per bucket, and bytes sent in (N-1)/N Psi: 2 in stage 1, A + 1 in stage 2.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, arXiv:1910.02054.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ..communication.buckets import Bucket, BucketMb, BucketPlan, TensorSpec, plan_buckets
from ..communication.collectives import all_gather
from ..communication.reduction import Means, Wire, reduce_buckets
from ..communication.sharding import Cut, pack_row, pack_rows, scatter_sum, unpack_row, unpack_rows
from ..ddp import of_optax
from ..layout import cut_leaves
from ..scopes import SYNC_SCOPE
from ..strategy import Layout, Ranks, Strategy, in_compute_dtype, register
from ..tree import like, named_leaves, split
from .elementwise import shard_state
from .owners import layout_by_owners

Part = Literal["elements", "leaves"]


@register
def zero1(bucket_mb: BucketMb = "default", *, shard: Part = "elements") -> Strategy:
    """One reduce-scatter per bucket as it fills, one all-gather per bucket as its parameters are updated.

    Args:
        bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_buckets``.
        shard: ``"elements"``: each rank updates 1/N of every parameter, for an element-wise optimizer. ``"leaves"``:
            each whole parameter belongs to one rank, for one that updates them one by one; see ``owners.py``.

    Raises:
        ValueError: If a cap or ``shard`` is out of range.
    """
    return _strategy("zero1", bucket_mb, shard, each_microbatch=False)


@register
def zero2(bucket_mb: BucketMb = "default", *, shard: Part = "elements") -> Strategy:
    """``zero1`` that keeps only shards of gradients between micro-batches, with at most two buckets in flight."""
    return _strategy("zero2", bucket_mb, shard, each_microbatch=True)


def _strategy(name: str, bucket_mb: BucketMb, shard: str, *, each_microbatch: bool) -> Strategy:
    if shard not in ("elements", "leaves"):
        raise ValueError(f"shard (={shard!r}) must be 'elements' or 'leaves'")
    plan = partial(_plan, bucket_mb, each_microbatch)
    plan(())  # refuses a bad cap now, not at the first step
    layout, variant = (layout_by_owners, "by leaves") if shard == "leaves" else (layout_shards, "")
    return Strategy(name, plan, layout, in_compute_dtype, reduce_scatter_grads, update_shards, variant=variant)


def _plan(bucket_mb: BucketMb, each_microbatch: bool, tensors: Sequence[TensorSpec]) -> BucketPlan:
    return replace(plan_buckets(tensors, bucket_mb), kind="reduce-scatter", each_microbatch=each_microbatch)


def layout_shards(params: Any, optimizer: Any, ranks: Ranks, trainable: Callable[[str], bool] | None = None) -> Layout:
    """Every rank has all parameters, and a shard of what the optimizer updates."""
    updated = cut_leaves(params, ranks.num_shards)
    state = shard_state(optimizer, split(updated, trainable)[0])
    return Layout(ranks, params, updated, state, of_optax(optimizer), trainable=trainable)


def reduce_scatter_grads(
    grads: Mapping[str, jax.Array], plan: BucketPlan, layout: Layout, divisor: Any, number: Any = None
) -> Means:
    """Sums gradients over ranks, bucket by bucket; this rank keeps its shards."""
    ranks, cuts = layout.ranks, layout.cuts
    wire = Wire(
        pack=lambda bucket, grads: pack_rows(grads, _of(bucket, cuts)),
        send=lambda buffer, key: scatter_sum(buffer, ranks.shard_axis, ranks.replica_axes)[0],
        unpack=lambda bucket, row: unpack_row(row, _of(bucket, cuts)),
        unsent=lambda name, grad: cuts[name].local_shard(grad, lax.axis_index(ranks.shard_axis)) * ranks.num_ranks,
    )
    return reduce_buckets(plan, wire, grads, divisor, number)


def update_shards(
    grads: Mapping[str, jax.Array], opt_state: Any, params: Any, plan: BucketPlan, layout: Layout, value: Any
) -> tuple[Any, Any]:
    """Each rank updates its shards of the parameters, and all gather them."""
    ranks, cuts, leaves = layout.ranks, layout.cuts, named_leaves(params)
    full, shard = ({name: specs[name] for name in leaves} for specs in (layout.specs, layout.shard_specs))
    local = ranks.on_devices(partial(local_shards, cuts=cuts, axis=ranks.shard_axis), (full,), shard)
    gather = ranks.on_devices(partial(gather_shards, plan=plan, cuts=cuts, axis=ranks.shard_axis), (shard,), full)

    shards = like(params, local(leaves))
    shards, opt_state = layout.optimizer.step(like(shards, dict(grads)), opt_state, shards, value, params)
    return like(params, gather(named_leaves(shards))), opt_state


def local_shards(params: Mapping[str, jax.Array], cuts: Mapping[str, Cut], axis: str) -> dict[str, jax.Array]:
    """Cuts this rank's shards out of full parameters; sends nothing."""
    rank = lax.axis_index(axis)
    return {name: cuts[name].local_shard(param, rank) for name, param in params.items()}


@jax.named_scope(SYNC_SCOPE)
def gather_shards(
    shards: Mapping[str, jax.Array], plan: BucketPlan, cuts: Mapping[str, Cut], axis: str
) -> dict[str, jax.Array]:
    """All-gathers the ranks' shards, bucket by bucket in the order of the plan, to full parameters by name."""
    if lax.axis_size(axis) == 1:
        return {name: cuts[name].from_rows(shard.reshape(1, -1)) for name, shard in shards.items()}
    full = {name: jnp.zeros(cuts[name].shape, shard.dtype) for name, shard in shards.items() if shard.size == 0}
    unpacked: dict[str, jax.Array] = {}
    for bucket in plan.gathers:
        rows = all_gather(pack_row(shards, _of(bucket, cuts)), axis, equal=True, as_bits=True)
        # Unpack each bucket when it arrives: XLA would unpack all of them after the last one.
        rows, unpacked = lax.optimization_barrier((rows, unpacked))
        full |= unpacked
        unpacked = unpack_rows(rows, _of(bucket, cuts))
    return full | unpacked


def _of(bucket: Bucket, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    return {tensor.name: cuts[tensor.name] for tensor in bucket.tensors}
