"""Bucketed data parallelism: gradients are reduced in buckets, each as soon as it is full.

Between flat and overlapped: a cap trades the latency of many calls against the bytes that the last bucket exposes.

    calls per step: number of buckets      bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: what the remaining backward is too short to hide, and at least the last bucket

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from functools import partial

from ..arguments import check_function
from ..communication.buckets import BucketMb, Rule, plan_all_reduces
from ..communication.hooks import Hook
from ..replicated import replicated
from ..strategy import Strategy, register


@register
def bucketed(bucket_mb: BucketMb = "default", *, rule: Rule = "before", hook: Hook | None = None) -> Strategy:
    """One all-reduce per bucket, as the bucket fills.

    Args:
        bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``: 1 and 25 MiB, then four times
            as much each, up to an eighth of all gradients' bytes if that is more than 25 MiB; see
            ``plan_all_reduces``.
        rule: When a bucket closes; see ``plan_buckets``.
        hook: How a bucket is summed over ranks, ``(buffer, axis) -> sum``, in place of an all-reduce in its own dtype:
            ``jaxddp.hooks.bf16``, ``fp16``, or one's own. It must have no state.

    Raises:
        ValueError: If a cap or the rule is out of range.
    """
    if hook is not None:
        check_function("hook", hook, "a function (buffer, axis) -> sum over the ranks, or None")
    plan_all_reduces([], bucket_mb, rule=rule)  # refuses a bad cap now, not at the first step
    return replicated("bucketed", partial(plan_all_reduces, bucket_mb=bucket_mb, rule=rule), hook)
