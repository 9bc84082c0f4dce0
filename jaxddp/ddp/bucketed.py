"""Bucketed data parallelism: gradients are reduced in buckets, each as soon as it is full.

Between flat and overlapped: a cap trades the latency of many calls against the bytes that the last bucket exposes.

    calls per step: number of buckets      bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: what the remaining backward is too short to hide, and at least the last bucket

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..arguments import check_function
from ..communication.buckets import BucketMb, BucketPlan, Rule, TensorSpec, plan_all_reduces
from ..communication.hooks import Hook
from ..network import Network
from ..replicated import replicated
from ..strategy import Strategy, register


@register
def bucketed(
    bucket_mb: BucketMb | Literal["auto"] = "default",
    *,
    rule: Rule = "before",
    hook: Hook | None = None,
    network: Network | float | None = None,
) -> Strategy:
    """One all-reduce per bucket, as the bucket fills.

    Args:
        bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``: 1 and 25 MiB, then four times
            as much each, up to an eighth of all gradients' bytes if that is more than 25 MiB; see
            ``plan_all_reduces``. With ``"auto"``, ``jaxddp.tune_buckets`` picks the caps by simulation.
        rule: When a bucket closes; see ``plan_buckets``.
        hook: How a bucket is summed over ranks, ``(buffer, axis) -> sum``, in place of an all-reduce in its own dtype:
            ``jaxddp.hooks.bf16``, ``fp16``, or one's own. It must have no state.
        network: For ``"auto"``: a ``Network``, or 10^9 bytes per second that one rank can send.

    Raises:
        ValueError: If a cap, the rule or the network is out of range, or ``"auto"`` has no network.
    """
    if hook is not None:
        check_function("hook", hook, "a function (buffer, axis) -> sum over the ranks, or None")
    if bucket_mb == "auto":
        if network is None:
            raise ValueError("bucket_mb (='auto') must come with network=, in 10^9 bytes per second per rank")
        network = network if isinstance(network, Network) else Network(network)
        return replicated("bucketed", Untuned(network, rule), hook)
    plan_all_reduces([], bucket_mb, rule=rule)  # refuses a bad cap now, not at the first step
    return replicated("bucketed", partial(plan_all_reduces, bucket_mb=bucket_mb, rule=rule), hook)


@dataclass(frozen=True)
class Untuned:
    """The plan of ``bucketed("auto")`` before ``jaxddp.tune_buckets`` has chosen its caps."""

    network: Network
    rule: Rule

    def __call__(self, tensors: Sequence[TensorSpec]) -> BucketPlan:
        """Refuses to plan.

        Raises:
            ValueError: If there are tensors.
        """
        if not tensors:
            return BucketPlan(())
        raise ValueError("bucket_mb (='auto') must be chosen first: call jaxddp.tune_buckets(trainer, state, batch)")
