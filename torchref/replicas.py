"""Whether ranks still hold the same: what every rank has in full must be equal bit for bit.

Checked are parameters and buffers that are not sharded, and the optimizer's state of what each rank updates in full:
one all-gather of a CRC-32 of each tensor, whose bytes the host reads.
"""

from __future__ import annotations

import zlib
from collections import Counter

import torch
import torch.distributed as dist

from jaxddp.processes.replicas import ReplicaError
from jaxddp.processes.watchdog import begin_step, end_step

from .agreement import group_device
from .checkpoint.rank_state import RankState
from .train import Trainer


@torch.no_grad()
def check_replicas(trainer: Trainer) -> None:
    """Compares what all ranks hold in full; call it on every rank, between two steps.

    Raises:
        ReplicaError: If ranks differ, on every rank.
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
    end_step()
    if not differing:
        return
    name, of_ranks = list(held)[differing[0]], sums[:, differing[0]].tolist()
    ((most, _),) = Counter(of_ranks).most_common(1)
    ranks = tuple(rank for rank, checksum in enumerate(of_ranks) if checksum != most)
    raise ReplicaError(name, ranks, len(differing) - 1, trainer.num_steps)


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)
