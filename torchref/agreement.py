"""Ranks agree on what they train: one that differs would hang the others, or mix one tensor with another.

Compared before the first collective of a wrapper, a sharded optimizer or a trainer, and after state was loaded; the
twin of ``jaxddp.training.agreement``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from jaxddp.processes.roll_call import disagreement

_LATE_S = 5.0  # of a rank that a step does not wait for, because it has nothing to send


def check_alike(alike: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Compares entries that must be the same on all ranks, JSON values or what a string tells; every rank calls it.

    Raises:
        ValueError: If one differs, on every rank; the line names the first such entry and the ranks.
    """
    said = [json.loads(text) for text in gather_texts(json.dumps(dict(alike), default=str), group)]
    if fault := disagreement(said, "rank"):
        refuse(fault, group)


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Gathers a text of every rank of a group, by rank; every rank calls it.

    torch's ``all_gather_object`` would unpickle what the network brings. Not counted with the gradients.
    """
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


def group_store(group: dist.ProcessGroup | None = None) -> dist.Store:
    """The store of a group."""
    found: Any = group or dist.group.WORLD
    return dist.distributed_c10d._world.pg_map[found][1]  # torch 2.13 has get_group_store, 2.9 may not


def refuse(fault: str, group: dist.ProcessGroup | None = None) -> NoReturn:
    """Raises an error that all ranks have found, once all have: one that ended first would fail the others."""
    with contextlib.suppress(RuntimeError):
        dist.barrier(group)
    raise ValueError(fault)


class StateLoads:
    """Refuses optimizer state that some ranks have loaded and others have not, or that differs.

    A rank that has loaded none would not join a collective about it. So those that have leave a note in the group's
    store before their next step, and read the others' after it, when all have begun it. Other steps cost nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Every rank of the group makes its own, in the same order."""
        self._group, self._is_new, self._num_compared = group, False, 0
        if dist.get_world_size(group) > 1:
            self._number = group_store(self._group).add(f"torchref/optimizers/{dist.get_rank(group)}", 1)

    def note(self, *_: Any) -> None:
        """Notes that this rank has loaded state; a hook of ``load_state_dict``."""
        self._is_new = dist.get_world_size(self._group) > 1

    def announce(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Tells the others, before a step, what this rank has loaded: JSON values that must be the same on all."""
        if self._is_new:
            group_store(self._group).set(self._key(dist.get_rank(self._group)), json.dumps(describe()))

    def compare(self) -> None:
        """Reads, after the step, what the others have loaded.

        Raises:
            ValueError: If another has loaded nothing, on the ranks that have; or if an entry differs, on every rank.
        """
        if not self._is_new:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        store, ranks = group_store(self._group), range(dist.get_world_size(self._group))
        with contextlib.suppress(RuntimeError):
            store.wait([self._key(rank) for rank in ranks], timedelta(seconds=_LATE_S))
        missing = [rank for rank in ranks if not store.check([self._key(rank)])]
        if missing:
            raise ValueError(
                f"optimizer state was loaded on rank {dist.get_rank(self._group)} and not on rank"
                f" {', '.join(map(str, missing))}: load it on every rank before the same step"
            )
        if fault := disagreement([json.loads(store.get(self._key(rank))) for rank in ranks], "rank"):
            refuse(fault, self._group)
        self._is_new, self._num_compared = False, self._num_compared + 1

    def _key(self, rank: int) -> str:
        return f"torchref/loads/{self._number}/{self._num_compared}/{rank}"
