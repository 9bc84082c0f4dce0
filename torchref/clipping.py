"""The global norm of gradients that may be sharded, and clipping by it.

A rank knows the squares of its own shards only; their sum over ranks takes an all-reduce of one number.

    norm = sqrt(sum of g^2 over replicated gradients + sum over ranks of g^2 over their shards)
    g    = g * min(1, max_norm / norm)                                  no epsilon, as in optax
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from jaxddp.arguments import is_number


def global_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of all tensors together."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors))))


def sharded_norm(
    shards: Sequence[torch.Tensor], replicated: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Euclidean norm, at least in float32, of all ranks' shards and of what is equal on every rank, together."""
    squares = _sum_of_squares(shards)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(squares, group=group)  # not recorded: it carries no gradients
    return torch.sqrt(squares + _sum_of_squares(replicated) if replicated else squares)


def clip_to_norm_(tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scales tensors in place so that their norm is at most ``max_norm``; a ValueError if that is not positive."""
    if not is_number(max_norm) or not max_norm > 0:
        raise ValueError(f"max_norm (={max_norm!r}) must be positive")
    torch._foreach_mul_(list(tensors), torch.clamp(max_norm / norm, max=1.0))


def _sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norm = global_norm(tensors)
    return norm.to(torch.promote_types(norm.dtype, torch.float32)).square()
