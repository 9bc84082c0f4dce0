"""The assignment's first script: the backward, and then an all-reduce of each gradient, or of all in one buffer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.train import local_rows

STRATEGIES = ("naive", "flat")


def make_model() -> nn.Module:
    """A perceptron in float64, with other weights on each rank."""
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)).double()


def data() -> list[Any]:
    """Global batches of inputs and labels."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 20, 10, dtype=torch.float64, generator=rng)
    return list(zip(inputs, torch.randint(5, (5, 20), generator=rng), strict=True))


def before(batches: Any) -> Any:
    """With communication of its own."""
    model, num_ranks = make_model(), dist.get_world_size()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        inputs, labels = local_rows(batch, dist.get_rank(), num_ranks)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        buffer = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(buffer)
        for grad, mean in zip(grads, (buffer / num_ranks).split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))
        optimizer.step()
    return model.state_dict()


def after(batches: Any, wrap: Callable[..., torchref.DataParallel]) -> Any:
    """With that of a wrapper."""
    model, num_ranks = make_model(), dist.get_world_size()
    net = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        inputs, labels = local_rows(batch, dist.get_rank(), num_ranks)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        net.finish_gradient_synchronization()
        optimizer.step()
    return model.state_dict()
