"""ZeRO stage 1: the optimizer's state is sharded.

Every rank needs all gradients only to update all parameters, as every other rank does. So each updates its own shard,
and the two halves of an all-reduce come apart: a reduce-scatter before the update, an all-gather after it. They send
what the all-reduce sent, and the optimizer's state and work are divided by the number of ranks N.

    ================ ========================== ==============================
    tensor           on each rank               bytes on each rank, AdamW, fp32
    ================ ========================== ==============================
    parameter        ``[shape]``                4 Psi
    gradient         ``[shape]``, then ``[c]``  4 Psi
    moments          ``[c]`` each, c = ceil(n/N) 8 Psi / N
    ================ ========================== ==============================

    g[r]  = row r of the sum over ranks of pack(gradients) / N      reduce-scatter, bucket by bucket
    p[r]  = chunk r of the parameters                               cut out, nothing travels
    p[r] += optimizer(g[r], state[r], p[r])                         state[r] lives on rank r alone
    p     = unpack(p[0] ... p[N-1])                                 all-gather, bucket by bucket

    calls per step: two per bucket      bytes sent per rank: 2 (N-1)/N * parameter bytes

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020 (section 5.1).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..communication.collectives import all_gather
from ..communication.compression import Compression, check_stateless, none
from ..communication.sharding import Cut, pack_own, unpack_chunks
from ..planning.buckets import BucketMb, BucketPlan, Rule, plan_buckets
from ..scopes import SYNC_SCOPE
from ..strategy import Strategy, register
from ..tree import like, named_leaves


@register
def zero1(bucket_mb: BucketMb = "default", *, rule: Rule = "before", compression: Compression = none) -> Strategy:
    """One reduce-scatter per bucket as it fills, one all-gather per bucket as its parameters are updated.

    Args:
        bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_buckets``.
        rule: When a bucket closes; see ``plan_buckets``.
        compression: What of the gradients travels; parameters travel as they are. None that remembers.

    Returns:
        The strategy.

    Raises:
        ValueError: If a cap or the rule is out of range, or the compression needs whole gradients.
    """
    check_stateless(compression, "where gradients are sharded: use none, bf16 or fp16, or a strategy of stage 0")
    plan_buckets([], bucket_mb, rule=rule)  # a bad cap is refused here, not at the first step
    return Strategy("zero1", lambda tensors: plan_buckets(tensors, bucket_mb, rule=rule), compression, stage=1)


def own_shards(params: Any, axis: str) -> Any:
    """Cuts out what this rank updates.

    Args:
        params: A tree of whole parameters, the same on every rank.
        axis: Name of the mesh axis.

    Returns:
        A tree of this rank's shards.
    """
    num_ranks, rank = lax.axis_size(axis), lax.axis_index(axis)
    return jax.tree.map(lambda leaf: Cut(leaf.shape, num_ranks).own(leaf, rank), params)


def gather_params(shards: Any, params: Any, plan: BucketPlan, axis: str, *, sends: bool = True) -> Any:
    """Puts the ranks' updated shards together, bucket by bucket in the order of the plan.

    Args:
        shards: A tree of this rank's shards.
        params: The tree of whole parameters that they were cut from.
        plan: Whose ``gathers`` say what travels together.
        axis: Name of the mesh axis.
        sends: Whether anything travels; if not, the other ranks' shards are taken to be like this one's.

    Returns:
        A tree like ``params``, the same on every rank.
    """
    num_ranks = lax.axis_size(axis)
    own = {name: shard.reshape(-1) for name, shard in named_leaves(shards).items()}
    whole = {
        # What has no elements is not gathered.
        name: leaf if leaf.size else jnp.zeros(leaf.shape, leaf.dtype)
        for name, leaf in named_leaves(params).items()
    }
    if num_ranks == 1:
        return like(params, {name: Cut(leaf.shape, 1).whole(own[name]) for name, leaf in whole.items()})
    with jax.named_scope(SYNC_SCOPE):
        unpacked: dict[str, jax.Array] = {}
        for bucket in plan.gathers:
            packed = pack_own(bucket, own)[None]
            buffer = all_gather(packed, axis, equal=True) if sends else jnp.tile(packed, (num_ranks, 1))
            # Unpacked as they arrive: left to itself, XLA copies all buckets out after the last has arrived.
            buffer, unpacked = lax.optimization_barrier((buffer, unpacked))
            whole.update(unpacked)
            unpacked = unpack_chunks(bucket, buffer)
        whole.update(unpacked)
    return like(params, whole)
