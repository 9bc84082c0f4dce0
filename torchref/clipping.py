"""The global norm of gradients that may be sharded, and clipping by it; for shards an all-reduce of one number.

norm = sqrt(sum of g^2 over replicated gradients + sum over ranks of g^2 over their shards)
g    = g * min(1, max_norm / norm)                                  no epsilon, as in optax
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from jaxddp.arguments import is_number


def global_norm(
    tensors: Sequence[torch.Tensor], shards: Sequence[torch.Tensor] = (), group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Euclidean norm, at least in float32, of tensors that are equal on every rank and of all ranks' shards."""
    if not shards:
        norms: list[torch.Tensor] = []
        for dtype in dict.fromkeys(one.dtype for one in tensors):  # in one order on all ranks
            some = [one for one in tensors if one.dtype == dtype]
            norms += torch._foreach_norm(some, 2, torch.promote_types(dtype, torch.float32))  # float16 would overflow
        return torch.linalg.vector_norm(torch.stack(norms))
    squares = [global_norm(part).square() for part in (shards, tensors) if part]
    if dist.get_world_size(group) > 1:
        dist.all_reduce(squares[0], group=group)  # not recorded: it carries no gradients
    return torch.sqrt(sum(squares[1:], squares[0]))


def clip_to_norm_(tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scales tensors in place so that their norm is at most ``max_norm``; a ValueError if that is not positive."""
    if not is_number(max_norm) or not max_norm > 0:
        raise ValueError(f"max_norm (={max_norm!r}) must be positive")
    torch._foreach_mul_(list(tensors), torch.clamp(max_norm / norm, max=1.0))
