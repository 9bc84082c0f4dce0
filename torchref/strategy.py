"""The contract of a strategy: a wrapper by name, and what it plans to communicate.

    net = make_strategy(name, module, ...)       the same weights on every rank from here on
    net(x) ... loss.backward()                   collectives are launched as gradients become ready
    net.finish_gradient_synchronization()        sums over ranks, divided once
    optimizer.step()                             or net.step(), of a strategy that shards the optimizer

``data_parallel.py`` holds the engine, ``ddp/`` and ``zero/`` the strategies, one file each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from jaxddp.planning.buckets import BucketMb, TensorSpec

if TYPE_CHECKING:
    from .data_parallel import DataParallel

STRATEGIES: dict[str, Callable[..., DataParallel]] = {}


def register(name: str) -> Callable[[type], type]:
    """Adds a class to ``STRATEGIES`` under a name; a decorator."""

    def add(strategy: type) -> type:
        STRATEGIES[name] = strategy
        return strategy

    return add


def make_strategy(name: str, module: nn.Module, **options: Any) -> DataParallel:
    """Wraps a module in a strategy by name.

    Args:
        name: A key of ``STRATEGIES``.
        module: What to train.
        **options: For its class.

    Returns:
        The wrapper.

    Raises:
        ValueError: If there is no strategy of that name.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](module, **options)


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describes a tensor by name, shape and dtype, which is all that a bucket plan needs."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def check_dense(name: str, grad: torch.Tensor) -> None:
    """Refuses gradients that cannot lie in a buffer.

    Raises:
        ValueError: If the gradient is not a dense tensor.
    """
    if grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name!r} has layout {grad.layout}: only dense gradients are supported")


def planned_collectives(net: DataParallel, *, num_microbatches: int = 1) -> list[tuple[str, int]]:
    """Lists what a wrapper communicates in one step.

    Args:
        net: The wrapper.
        num_microbatches: Parts of each rank's batch.

    Returns:
        ``(kind, bytes of the full buffer)`` in launch order.
    """
    return net.planned(num_microbatches) if net.compression.sends else []


def resolve_bucket_mb(bucket_mb: BucketMb, bucket_size_mb: BucketMb) -> BucketMb:
    """Returns the bucket cap that was given under either of its two names.

    Args:
        bucket_mb: The option.
        bucket_size_mb: Its older name.

    Raises:
        ValueError: If both are given.
    """
    if bucket_size_mb == "default":
        return bucket_mb
    if bucket_mb != "default":
        raise ValueError(
            f"bucket_mb (={bucket_mb!r}) and bucket_size_mb (={bucket_size_mb!r}) are one option: give one of them"
        )
    return bucket_size_mb
