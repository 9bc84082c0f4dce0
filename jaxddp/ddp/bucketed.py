"""Bucketed data parallelism: gradients travel in buckets, each as soon as it is full.

Between flat and overlapped: a cap trades the latency of many calls against the bytes that the last bucket exposes.

    calls per step: number of buckets      bytes sent per rank: 2 (N-1)/N * gradient bytes
    exposed: what the remaining backward is too short to hide, and at least the last bucket

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ..communication.compression import Compression, none
from ..planning.buckets import BucketMb, BucketPlan, Rule, TensorSpec, plan_buckets
from ..planning.network import Network
from ..strategy import Strategy, register


@register
def bucketed(
    bucket_mb: BucketMb | Literal["auto"] = "default",
    *,
    rule: Rule = "before",
    compression: Compression = none,
    network: Network | float | None = None,
) -> Strategy:
    """One all-reduce per bucket, as the bucket fills.

    Args:
        bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_buckets``. ``"auto"``
            has ``Trainer`` pick the caps by simulation, for an accelerator that ``targets`` knows.
        rule: When a bucket closes; see ``plan_buckets``.
        compression: What travels.
        network: What ``"auto"`` picks them for: a ``Network``, or 10^9 bytes per second that one rank can send.

    Returns:
        The strategy.

    Raises:
        ValueError: If a cap, the rule or the network is out of range, or ``"auto"`` has no network.
    """
    if bucket_mb == "auto":
        if network is None:
            raise ValueError("bucket_mb (='auto') must come with network=, in 10^9 bytes per second per rank")
        return _tuned(network if isinstance(network, Network) else Network(network), rule, compression)
    plan_buckets([], bucket_mb, rule=rule)  # a bad cap is refused here, not at the first step
    return Strategy("bucketed", lambda tensors: plan_buckets(tensors, bucket_mb, rule=rule), compression)


def _tuned(network: Network, rule: Rule, compression: Compression) -> Strategy:
    def plan(tensors: Sequence[TensorSpec]) -> BucketPlan:
        raise ValueError("bucket_mb (='auto') must be resolved by a Trainer: elsewhere give a number")

    def tune(timing: Any) -> Strategy:
        from ..simulation.tuning import best_caps  # which needs strategies itself

        return bucketed(best_caps(timing, network, rule), rule=rule, compression=compression)

    return Strategy("bucketed", plan, compression, tune)
