"""Communication hooks: how ``BucketedDDP`` sums a bucket over ranks, as in PyTorch's DDP.

A hook is a function ``(buffer, group) -> the buffer's sum over the ranks of the group``, of the same shape and dtype,
without state. It may return ``(total, work)`` instead: then ``total`` holds the sum once ``work.wait()`` returns.

========== ============================== ==============================================================
hook       n elements are sent as         what is lost
========== ============================== ==============================================================
all_reduce themselves, in one call        nothing; the default
bf16       n of 2 bytes, in one call      all but 8 bits of each summand and of their sum
fp16       n of 2 bytes, in one call      all but 11 bits, and what is below 6e-8 or, in the mean, above 65504
========== ============================== ==============================================================
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from . import collectives

Hook: TypeAlias = Callable[[torch.Tensor, "dist.ProcessGroup | None"], Any]


def all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """Sums in the buffer's own dtype, in place."""
    return buffer, collectives.all_reduce(buffer, group, async_op=True)


def bf16(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """Sums in bfloat16."""
    return _cast(buffer, buffer.to(torch.bfloat16), group, 1)


def fp16(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """Sums in float16, divided by the number of ranks first: a sum above 65504 is infinite."""
    num_ranks = dist.get_world_size(group)
    return _cast(buffer, (buffer / num_ranks).to(torch.float16), group, num_ranks)


def _cast(buffer: torch.Tensor, sent: torch.Tensor, group: Any, factor: int) -> Any:
    work: Any = collectives.all_reduce(sent, group, async_op=True)
    return buffer, collectives.Pending([work], lambda: buffer.copy_(sent).mul_(factor))
