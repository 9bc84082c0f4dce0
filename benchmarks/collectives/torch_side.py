"""The collectives in PyTorch: one process per rank, over Gloo or NCCL.

Collectives that work in place get a fresh input before every call, untimed; others write into a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchref.agreement import group_device
from torchref.communication import collectives, ring
from torchref.communication.collectives import record

from ..harness.ranks import Ranks
from .cases import (
    ELEMENT_BYTES,
    PRIMITIVES,
    RINGS,
    brought_length,
    expected,
    num_wrong,
    options_of,
    plan,
    size_of,
    values,
)
from .interleaving import Batch, Call, RanksJob, Side, Timed, measure

KINDS = {name: name.replace("_", "-") for name in PRIMITIVES}
IN_PLACE = ("all_reduce", "broadcast")


def run(ranks: Ranks, job: RanksJob) -> None:
    """Measures; runs on each rank, inside a process group."""
    on_gpu = ranks.kind == "gpus"
    device = group_device()
    wait: Callable[[Any], Any] = (lambda _: torch.cuda.synchronize()) if on_gpu else (lambda _: None)

    def ready(batch: Batch) -> Callable[[str], Call]:
        lengths = {name: brought_length(name, batch.asked_bytes, ranks.num) for name in batch.names}
        brought = torch.from_numpy(values(dist.get_rank(), max(lengths.values()))).to(device)
        in_place = [lengths[name] for name in IN_PLACE if name in lengths]
        overwritten = brought.new_empty(max(in_place, default=0))
        return lambda name: _made(name, batch.asked_bytes, brought[: lengths[name]], overwritten)

    side = Side(torch.cuda.get_device_name() if on_gpu else "cpu", {"torch": torch.__version__})
    measure(job, side, ready, wait)


def _made(name: str, asked_bytes: int, given: Tensor, overwritten: Tensor) -> Call:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    size_bytes = size_of(name, asked_bytes, num_ranks)
    segments = expected(name, rank, num_ranks, size_bytes // ELEMENT_BYTES)
    timed = Timed(name, asked_bytes, size_bytes, planned=plan(name, KINDS, size_bytes, num_ranks))
    call = Call(
        (lambda: overwritten.copy_(given)) if name in IN_PLACE else (lambda: given),
        _function(name, num_ranks),
        lambda result: num_wrong(result.cpu().numpy(), segments),
        timed,
    )
    with record() as issued:
        call.try_out()
    timed.found = [(one.kind, one.num_bytes) for one in issued]
    return call


def _function(name: str, num_ranks: int) -> Callable[[Tensor], Tensor]:
    options = options_of(name, num_ranks)
    collective = getattr(ring if name in RINGS else collectives, name)

    def call(tensor: Tensor) -> Tensor:
        result = collective(tensor, **options)
        return tensor if name in IN_PLACE else result

    return call
