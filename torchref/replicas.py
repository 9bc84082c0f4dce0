"""Whether ranks still hold the same: what every rank has in full must be equal bit for bit.

Checked are parameters and buffers that are not sharded, and the optimizer's state of what each rank updates in full:
one all-gather of the CRC-32 of each tensor, whose bytes the host reads.
"""

import json
import zlib
from collections import Counter

import torch
import torch.distributed as dist

from jaxddp.processes.roll_call import replicas_differ
from jaxddp.processes.watchdog import begin_step, end_step

from .agreement import gather_texts
from .checkpoint.rank_state import RankState
from .train import Trainer


@torch.no_grad()
def check_replicas(trainer: Trainer) -> None:
    """Compares what all ranks hold in full; call it on every rank, between two steps.

    Raises:
        ReplicaError: If ranks differ, on every rank.
    """
    if not dist.is_initialized():
        return
    whole = {name: one for name, (one, cut) in RankState.of(trainer).held().items() if cut is None}
    if not getattr(trainer.net, "broadcasts_buffers", True):  # each rank has its own
        whole = {name: one for name, one in whole.items() if not name.startswith("buffers.")}
    sums = {name: _checksum(one) for name, one in whole.items() if isinstance(one, torch.Tensor) and one.numel()}
    begin_step(is_call=True)
    of_ranks = [json.loads(text) for text in gather_texts(json.dumps(sums))]
    end_step()
    differing = [name for name in sums if len({one.get(name) for one in of_ranks}) > 1]
    if differing:
        found = [one.get(differing[0]) for one in of_ranks]
        ((most, _),) = Counter(found).most_common(1)
        ranks = [rank for rank, checksum in enumerate(found) if checksum != most]
        raise replicas_differ(differing[0], ranks, len(differing) - 1, trainer.num_steps)


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)
