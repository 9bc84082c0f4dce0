"""Whether ranks still hold the same: what every rank has in full must be equal bit for bit.

The twin of ``jaxddp.training.replicas``, which says why. Checked are parameters and buffers that are not sharded, and
the optimizer's state of what each rank updates in full: one all-gather of a CRC-32 of each tensor, whose bytes the host
reads, and one broadcast of the first tensor that differs.
"""

from __future__ import annotations

import zlib
from collections import Counter

import torch
import torch.distributed as dist

from jaxddp.processes.replicas import ReplicasDifferError, describe_difference
from jaxddp.processes.watchdog import begin_step, end_step

from .agreement import group_device
from .checkpoint.rank_state import RankState
from .train import Trainer


class ReplicaError(ReplicasDifferError):
    """Ranks hold different values of what should be the same: as jaxddp's error of this name says."""

    def __init__(
        self, message: str, name: str = "", ranks: tuple[int, ...] = (), num_tensors: int = 0, difference: float = 0.0
    ) -> None:
        super().__init__(message)
        self.name, self.ranks, self.num_tensors, self.difference = name, ranks, num_tensors, difference


@torch.no_grad()
def check_replicas(trainer: Trainer) -> None:
    """Compares what all ranks hold in full; call it on every rank, between two steps.

    Raises:
        ReplicaError: If ranks differ, on every rank.
        ValueError: If some ranks train apart from the others.
    """
    whole = {name: one for name, (one, cut) in RankState.of(trainer).held().items() if cut is None}
    held = {name: one for name, one in whole.items() if isinstance(one, torch.Tensor) and one.numel()}
    if not dist.is_initialized() or dist.get_world_size() == 1 or not held:
        return
    begin_step(is_call=True)
    mine = torch.tensor([_checksum(tensor) for tensor in held.values()], device=group_device())
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    sums = torch.stack(gathered).cpu()  # [num_ranks, num_tensors]
    differing = [place for place in range(len(held)) if len(set(sums[:, place].tolist())) > 1]
    if not differing:
        end_step()
        return
    name, of_ranks = list(held)[differing[0]], sums[:, differing[0]].tolist()
    ((most, _),) = Counter(of_ranks).most_common(1)
    ranks = tuple(rank for rank, checksum in enumerate(of_ranks) if checksum != most)
    theirs = held[name].to(group_device(), copy=True).contiguous()
    dist.broadcast(theirs, src=of_ranks.index(most))
    apart = (held[name].to(group_device()).double() - theirs.double()).abs().max().reshape(1)
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    end_step()
    message = describe_difference(name, ranks, len(differing) - 1, "tensors", float(apart), trainer.num_steps)
    raise ReplicaError(message, name, ranks, len(differing), float(apart))


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)
