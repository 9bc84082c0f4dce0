"""ZeRO stage 1: the optimizer's state is sharded.

Each rank updates its own shard of the parameters. The all-reduce of the gradients becomes a reduce-scatter before the
update and an all-gather of the parameters after it: the same bytes, with the optimizer's state and work divided by the
number of ranks N.

    ================ ========================== ==============================
    tensor           on each rank               bytes on each rank, AdamW, fp32
    ================ ========================== ==============================
    parameter        ``[shape]``                4 Psi
    gradient         ``[shape]``, then ``[c]``  4 Psi, then 4 Psi / N
    moments          ``[c]`` each, c = ceil(n/N) 8 Psi / N
    ================ ========================== ==============================

    g[r]  = row r of the sum over ranks of pack(gradients) / N      reduce-scatter, bucket by bucket as they fill
    p[r]  = chunk r of the parameters                               a slice, no communication
    p[r] += optimizer(g[r], state[r], p[r])                         state[r] is on rank r alone
    p     = unpack(p[0] ... p[N-1])                                 all-gather, bucket by bucket

With ``Trainer(compute_dtype=...)``, full parameters are copies in that dtype (2 Psi in bfloat16), cast before the
gather, and p[r] are masters that rank r alone holds (4 Psi / N).

    calls per step: two per bucket      bytes sent per rank: 2 (N-1)/N * parameter bytes

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.1).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ..communication.buckets import BucketMb, BucketPlan, Rule, plan_buckets
from ..communication.collectives import all_gather
from ..communication.compression import Compression, check_stateless, none
from ..communication.reduction import REDUCE_SCATTER
from ..communication.sharding import Cut, pack_local_shards, unpack_chunks
from ..scopes import SYNC_SCOPE
from ..strategy import Strategy, register
from ..tree import like, named_leaves


@register
def zero1(
    bucket_mb: BucketMb = "default",
    *,
    rule: Rule = "before",
    shard: Literal["elements", "leaves"] = "elements",
    compression: Compression = none,
) -> Strategy:
    """One reduce-scatter per bucket as it fills, one all-gather per bucket as its parameters are updated.

    Args:
        bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_buckets``.
        rule: When a bucket closes; see ``plan_buckets``.
        shard: ``"elements"``: each rank updates 1/N of every parameter, which an element-wise optimizer allows.
            ``"leaves"``: each whole parameter belongs to one rank, for all optimizers that update them one by one; see
            ``leaves.py``.
        compression: Gradient compression; must be stateless. Parameters are gathered uncompressed.

    Returns:
        The strategy.

    Raises:
        ValueError: If a cap, the rule or ``shard`` is out of range, or the compression has state.
    """
    if shard not in ("elements", "leaves"):
        raise ValueError(f"shard (={shard!r}) must be 'elements' or 'leaves'")
    check_stateless(compression, "where gradients are sharded: use none, bf16 or fp16, or a strategy without ZeRO")
    plan_buckets([], bucket_mb, rule=rule)  # refuses a bad cap now, not at the first step
    return Strategy(
        "zero1",
        partial(plan_buckets, bucket_mb=bucket_mb, rule=rule),
        compression,
        reduce=REDUCE_SCATTER,
        shards_optimizer_state=True,
        shards_leaves=shard == "leaves",
    )


def local_shards(params: Any, axis: str) -> Any:
    """Cuts out this rank's shards.

    Args:
        params: A tree of full parameters, equal on all ranks.
        axis: Name of the mesh axis.

    Returns:
        A tree of this rank's shards.
    """
    num_ranks, rank = lax.axis_size(axis), lax.axis_index(axis)
    return jax.tree.map(lambda leaf: Cut(leaf.shape, num_ranks).local_shard(leaf, rank), params)


def gather_params(
    shards: Any, params: Any, plan: BucketPlan, axis: str, *, sends: bool = True, as_bits: bool = False
) -> Any:
    """All-gathers the ranks' updated shards, bucket by bucket in the order of the plan.

    Args:
        shards: A tree of this rank's shards.
        params: The tree of full parameters that they were cut from.
        plan: Its ``gathers`` are the buckets.
        axis: Name of the mesh axis.
        sends: False replaces communication by copies of this rank's shards.
        as_bits: As for ``all_gather``.

    Returns:
        A tree like ``params``, equal on all ranks.
    """
    num_ranks = lax.axis_size(axis)
    if num_ranks == 1:
        return jax.tree.map(lambda shard, param: shard.reshape(param.shape), shards, params)
    local = {name: shard.reshape(-1) for name, shard in named_leaves(shards).items()}
    full = {}
    for name, leaf in named_leaves(params).items():
        if leaf.size == 0:  # in no bucket
            full[name] = jnp.zeros(leaf.shape, leaf.dtype)
    with jax.named_scope(SYNC_SCOPE):
        unpacked: dict[str, jax.Array] = {}
        for bucket in plan.gathers:
            packed = pack_local_shards(bucket, local)[None]
            buffer = (
                all_gather(packed, axis, equal=True, as_bits=as_bits) if sends else jnp.tile(packed, (num_ranks, 1))
            )
            # Unpack each bucket when it arrives: XLA would unpack all of them after the last one.
            buffer, unpacked = lax.optimization_barrier((buffer, unpacked))
            full.update(unpacked)
            unpacked = unpack_chunks(bucket, buffer)
        full.update(unpacked)
    return like(params, full)
