"""The CUDA allocator's figures of torchref's strategies, each in separate processes.

torch creates optimizer state in the first step, so it is not there after initialisation, as in the report's table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import torchref
from torchref.launch import launch
from torchref.models import build, loss_fn

from .variants import TIMEOUT_S, Allocation, MemorySetup


class Counter(NamedTuple):
    """Counts bytes allocated on this rank's device: now, and at the peak so far."""

    in_use: Callable[[], int]
    peak: Callable[[], int]


CUDA = Counter(torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)


def allocate_torch(setup: MemorySetup, name: str) -> Allocation | str:
    """Takes two steps on this machine's GPUs; returns the figures of rank 0's allocator, or why there are none."""
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return "torch finds no GPU"
    num_ranks = min(setup.num_ranks, num_gpus)
    return launch(allocate_on_rank, setup, name, num_ranks=num_ranks, backend="nccl", timeout_s=TIMEOUT_S)[0]


def allocate_on_rank(setup: MemorySetup, name: str, counter: Counter = CUDA) -> Allocation:
    """Takes two steps on this rank, inside a process group."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
    num_ranks, start = dist.get_world_size(), counter.in_use()
    options: dict[str, Any] = {"lr": 1e-3}
    module = build(setup.model).to(device)
    if name in ("zero1", "zero2"):
        net: Any = torchref.make_strategy(name, module, optimizer_cls=torch.optim.AdamW, **options)
        trainer = torchref.Trainer(loss_fn, net, net)
    else:
        net = torchref.make_strategy(name, module)
        trainer = torchref.Trainer(loss_fn, torch.optim.AdamW(net.parameters(), **options), net)
    made = counter.in_use()
    shape = setup.batch_size // setup.num_ranks, setup.config.context
    for _ in range(2):
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        trainer.step({"tokens": tokens, "targets": tokens})
    if on_gpu:
        torch.cuda.synchronize()
    name_of_device = torch.cuda.get_device_name() if on_gpu else "cpu"
    return Allocation(name_of_device, num_ranks, made - start, counter.peak() - start, counter.in_use() - start)
