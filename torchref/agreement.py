"""Ranks agree on what they train: one that differs would hang the others, or mix one tensor with another.

Compared before the first collective of a wrapper, a sharded optimizer or a trainer.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from jaxddp.processes.roll_call import disagreement


def check_alike(alike: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Compares entries that must be the same on all ranks; every rank raises a ValueError about the first other one."""
    if dist.get_world_size(group) == 1:
        return
    said = [json.loads(text) for text in gather_texts(json.dumps(dict(alike), default=str), group)]
    if fault := disagreement(said, "rank"):
        refuse(fault, group)


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Gathers a text of every rank of a group; torch's ``all_gather_object`` would unpickle what the network brings."""
    device = group_device(group)
    written = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(written)], device=device), group=group)
    padded = written.new_zeros(max(int(size) for size in sizes))
    padded[: len(written)] = written
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(size)].cpu().numpy().tobytes().decode() for part, size in zip(parts, sizes, strict=True)]


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of this rank's tensors in the collectives of a group."""
    is_on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")


def refuse(fault: str, group: dist.ProcessGroup | None = None) -> NoReturn:
    """Raises an error that all ranks have found, once all have: one that ended first would fail the others."""
    with contextlib.suppress(RuntimeError):
        dist.barrier(group)
    raise ValueError(fault)
