"""The assignment's optimizer state sharding: each rank updates some of the parameters, and broadcasts them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.train import local_rows

STRATEGIES = ("naive", "bucketed")


def make_model() -> nn.Module:
    """A perceptron in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)).double()


def data() -> list[Any]:
    """Global batches of inputs and labels."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 20, 10, dtype=torch.float64, generator=rng)
    return list(zip(inputs, torch.randint(5, (5, 20), generator=rng), strict=True))


def before(batches: Any) -> Any:
    """With an optimizer of its own, behind the gradients of ``DistributedDataParallel``."""

    class Sharded(torch.optim.Optimizer):
        def __init__(self, params: Any, optimizer_cls: Any, **kwargs: Any) -> None:
            self.owners: dict[Any, int] = {}
            self.optimizer_cls, self.kwargs, self.local = optimizer_cls, kwargs, None
            super().__init__(params, kwargs)

        def add_param_group(self, param_group: Any) -> None:
            super().add_param_group(param_group)
            for parameter in param_group["params"]:
                self.owners[parameter] = len(self.owners) % dist.get_world_size()
            mine = [one for one in param_group["params"] if self.owners[one] == dist.get_rank()]
            if self.local is not None:
                self.local.add_param_group({**param_group, "params": mine})
            elif mine:
                self.local = self.optimizer_cls(mine, **self.kwargs)

        def step(self, closure: Any = None) -> Any:
            if self.local is not None:
                self.local.step()
            for parameter, owner in self.owners.items():
                dist.broadcast(parameter.data, owner)

    model = make_model()
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = Sharded(net.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    for batch in batches:
        inputs, labels = local_rows(batch, dist.get_rank(), dist.get_world_size())
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return model.state_dict()


def after(batches: Any, wrap: Callable[..., torchref.DataParallel]) -> Any:
    """With one that is there."""
    model = make_model()
    net = wrap(model)
    optimizer = torchref.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    for batch in batches:
        inputs, labels = local_rows(batch, dist.get_rank(), dist.get_world_size())
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        net.finish_gradient_synchronization()
        optimizer.step()
    return model.state_dict()
