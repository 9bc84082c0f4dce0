"""Bucketed data parallelism: gradients travel in buckets, each as soon as it is full.

Between flat and overlapped: a cap trades the latency of many calls against the bytes that the last bucket exposes.

    calls per step: number of buckets      bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: what the remaining backward is too short to hide, and at least the last bucket

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

from ..buckets import BucketMb, Rule, plan_buckets
from ..compression import Compression, none
from ..strategy import Strategy, register


@register
def bucketed(bucket_mb: BucketMb = "default", *, rule: Rule = "before", compression: Compression = none) -> Strategy:
    """One all-reduce per bucket, as the bucket fills.

    Args:
        bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_buckets``.
        rule: When a bucket closes; see ``plan_buckets``.
        compression: What travels.

    Returns:
        The strategy.

    Raises:
        ValueError: If a cap or the rule is out of range.
    """
    plan_buckets([], bucket_mb, rule=rule)  # a bad cap is refused here, not at the first step
    return Strategy("bucketed", lambda tensors: plan_buckets(tensors, bucket_mb, rule=rule), compression)
