"""ZeRO stage 2: gradients are sharded as well.

Stage 1 keeps full gradients while it adds up micro-batches. Here each micro-batch reduce-scatters its buckets as they
fill, and only shards are added up.

    ================ ========================== =========================================
    tensor           on each rank               bytes on each rank, AdamW, fp32
    ================ ========================== =========================================
    parameter        ``[shape]``                4 Psi
    gradient         ``[shape]``, in its bucket the buckets in flight, at most two
    summed gradient  ``[c]``, c = ceil(n/N)     4 Psi / N
    moments          ``[c]`` each               8 Psi / N
    ================ ========================== =========================================

    over micro-batches a:  g[r] += row r of the sum over ranks of pack(gradients of a)      reduce-scatter
    then as stage 1 does:  p[r] += optimizer(g[r] / (N A), state[r], p[r]);  p = all-gather of p[r]

    calls per step: A + 1 per bucket for A micro-batches      bytes sent per rank: (A + 1) (N-1)/N * parameter bytes

With several micro-batches, at most two buckets are in flight at a time: on a network that is slower than the backward,
the backward waits. ``accumulate="full"`` adds up full gradients and reduces them once, with the memory and the speed of
stage 1. With one micro-batch both are the program of stage 1.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.2).
"""

from __future__ import annotations

from typing import Literal

from ..communication.buckets import BucketMb, Rule
from ..communication.compression import Compression, none
from ..strategy import Strategy, register
from .stage1 import zero1


@register
def zero2(
    bucket_mb: BucketMb = "default",
    *,
    rule: Rule = "before",
    accumulate: Literal["shards", "full"] = "shards",
    shard: Literal["elements", "leaves"] = "elements",
    compression: Compression = none,
) -> Strategy:
    """``zero1`` that keeps only shards of gradients between micro-batches.

    Args:
        bucket_mb: As for ``zero1``.
        rule: As for ``zero1``.
        accumulate: ``"shards"`` communicates in every micro-batch and saves memory; ``"full"`` communicates once.
        shard: As for ``zero1``.
        compression: As for ``zero1``.

    Returns:
        The strategy.

    Raises:
        ValueError: If a cap, the rule, ``accumulate`` or ``shard`` is out of range.
    """
    if accumulate not in ("shards", "full"):
        raise ValueError(f"accumulate (={accumulate!r}) must be 'shards' or 'full'")
    strategy = zero1(bucket_mb, rule=rule, shard=shard, compression=compression)
    return strategy._replace(name="zero2", shards_gradients=True, reduces_each_microbatch=accumulate == "shards")
