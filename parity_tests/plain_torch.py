"""Training with `torchref.plain`, on one of several ranks; imports no JAX, because rank processes load this file."""

import functools
from typing import Any

import torch
import torch.distributed as dist

from torchref import plain
from torchref.interop import from_numpy, to_numpy
from torchref.models.toy_test import build, loss_fn
from torchref.train import local_rows

from .inputs import Arrays, batches
from .torch_side import OPTIMIZERS


def train_on_rank(
    name: str, optimizer: str, weights: Arrays, num_steps: int, options: dict[str, Any]
) -> tuple[Arrays, list[int]]:
    """Trains the toy in float64.

    Returns:
        The weights, and the bytes that each parameter of the module still holds.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = build("toy", seed=rank).double()
    if rank == 0:  # the others start from weights of their own, which the strategy has to replace
        from_numpy(weights, module)
    optimizer_cls, kwargs = OPTIMIZERS[optimizer]
    step = getattr(plain, name)(loss_fn, functools.partial(optimizer_cls, **kwargs), module, **options)
    step, shards = step if name == "zero3" else (step, [])
    for batch in batches("toy", "float64")[:num_steps]:
        tensors = {key: torch.from_numpy(array) for key, array in batch.items()}
        step(local_rows(tensors, rank, num_ranks))
    held_bytes = [parameter.untyped_storage().nbytes() for parameter in module.parameters()]
    for parameter, shard in zip(module.parameters(), shards, strict=False):
        full = torch.empty(num_ranks * len(shard), dtype=shard.dtype)
        dist.all_gather(list(full.chunk(num_ranks)), shard.detach())
        parameter.data = full[: parameter.numel()].view(parameter.shape)
    return to_numpy(module), held_bytes
