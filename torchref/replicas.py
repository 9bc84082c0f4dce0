"""Whether ranks still hold the same: what every rank has in full must be equal bit for bit.

The twin of ``jaxddp.training.replicas``, which says why. Checked are parameters and buffers that are not sharded, and
the optimizer's state of what each rank updates in full.

    checksum_r = sum over words i of (2 i + 1) * mix(word_i)   mod 2^32        of each tensor on rank r

One all-gather of ``[num_tensors]`` numbers.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from jaxddp.processes.replicas import ReplicaError
from jaxddp.processes.watchdog import begin_step, end_step

from .agreement import group_device
from .checkpoint.rank_state import RankState
from .train import Trainer

_CHUNK_WORDS = 2**22  # at a time: copies of a whole tensor could be more than there is memory for
_FACTOR = 0x85EBCA6B - 2**32  # as in MurmurHash3


@torch.no_grad()
def check_replicas(trainer: Trainer) -> None:
    """Compares what all ranks hold in full; call it on every rank, between two steps.

    Raises:
        ReplicaError: If ranks differ, on every rank.
        ValueError: If some ranks train apart from the others.
    """
    held = {name: tensor for name, tensor in RankState.of(trainer).replicated().items() if tensor.numel()}
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
    """The checksum of a tensor's bits.

    Example:
        >>> _checksum(torch.tensor([1.0, 2.0])) == _checksum(torch.tensor([2.0, 1.0]))
        False
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().contiguous().reshape(-1)
    flat = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
    bits = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.itemsize, torch.int32))  # 8 bytes become two words
    total = 0
    for start in range(0, bits.numel(), _CHUNK_WORDS):
        words = bits[start : start + _CHUNK_WORDS].int()  # its products wrap, and its shifts keep the sign
        words = (words ^ ((words >> 16) & 0xFFFF)) * _FACTOR
        words ^= (words >> 13) & 0x7FFFF
        words *= torch.arange(2 * start + 1, 2 * (start + words.numel()), 2, device=words.device).int()
        total += int(words.sum())
    return total & 0xFFFFFFFF
