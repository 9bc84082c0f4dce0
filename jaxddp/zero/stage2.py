"""ZeRO stage 2: gradients are sharded as well.

What stage 1 keeps whole for longer than it must is gradients: of all micro-batches but the last. Here a bucket's
gradients are reduced and scattered as soon as they are there, and what outlives the bucket is a shard.

    ================ ========================== =========================================
    tensor           on each rank               bytes on each rank, AdamW, fp32
    ================ ========================== =========================================
    parameter        ``[shape]``                4 Psi
    gradient         ``[shape]``, in its bucket a bucket, of a compiled program: what is in flight
    summed gradient  ``[c]``, c = ceil(n/N)     4 Psi / N
    moments          ``[c]`` each               8 Psi / N
    ================ ========================== =========================================

    over micro-batches a:  g[r] += row r of the sum over ranks of pack(gradients of a)      reduce-scatter
    then as stage 1 does:  p[r] += optimizer(g[r] / (N A), state[r], p[r]);  p = all-gather of p[r]

    calls per step: A + 1 per bucket for A micro-batches      bytes sent per rank: (A + 1) (N-1)/N * parameter bytes

At most two buckets are in flight at a time then: on a network that is slower than the backward, the backward waits.
With ``accumulate="full"`` gradients of all micro-batches are summed whole and sent once: the memory of stage 1, and its
speed. With one micro-batch the two are the same program, and the same as stage 1's.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020 (section 5.2).
"""

from __future__ import annotations

from typing import Literal

from ..communication.compression import Compression, none
from ..planning.buckets import BucketMb, Rule
from ..strategy import Strategy, register
from .stage1 import zero1


@register
def zero2(
    bucket_mb: BucketMb = "default",
    *,
    rule: Rule = "before",
    accumulate: Literal["shards", "full"] = "shards",
    compression: Compression = none,
) -> Strategy:
    """Does what ``zero1`` does, and between micro-batches keeps shards of gradients only.

    Args:
        bucket_mb: As for ``zero1``.
        rule: As for ``zero1``.
        accumulate: ``"shards"`` communicates in every micro-batch and keeps the memory; ``"full"`` communicates once
            and keeps the speed.
        compression: What of the gradients travels.

    Returns:
        The strategy.

    Raises:
        ValueError: If a cap, the rule or ``accumulate`` is out of range.
    """
    if accumulate not in ("shards", "full"):
        raise ValueError(f"accumulate (={accumulate!r}) must be 'shards' or 'full'")
    strategy = zero1(bucket_mb, rule=rule, compression=compression)
    return strategy._replace(name="zero2", stage=2, accumulate=accumulate)
