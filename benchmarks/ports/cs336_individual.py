"""The assignment's wrapper for individual parameters: hooks start an all-reduce as soon as a gradient is ready."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.train import local_rows

STRATEGIES = ("overlapped", "naive")


class Tied(nn.Module):
    """A language model whose head shares the embedding's matrix, with a scale that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, ``[n, length, 12]``."""
        return self.scale * torch.tanh(self.hidden(self.embedding(tokens))) @ self.embedding.weight.T


def make_model() -> nn.Module:
    """The model in float64, with other weights on each rank."""
    torch.manual_seed(dist.get_rank())
    return Tied().double()


def data() -> list[torch.Tensor]:
    """Global batches of text."""
    return list(torch.randint(12, (5, 20, 7), generator=torch.Generator().manual_seed(0)))


def loss_fn(net: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy."""
    return nn.functional.cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def before(batches: Any) -> Any:
    """With a wrapper of its own."""

    class Overlapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module
            self.works: list[Any] = []
            for parameter in module.parameters():
                dist.broadcast(parameter.data, 0)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.start)

        def start(self, parameter: Any) -> None:
            self.works.append((dist.all_reduce(parameter.grad, async_op=True), parameter.grad))

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

        def finish_gradient_synchronization(self) -> None:
            for work, grad in self.works:
                work.wait()
                grad.div_(dist.get_world_size())
            self.works.clear()

    model = make_model()
    net = Overlapped(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(net, local_rows(batch, dist.get_rank(), dist.get_world_size())).backward()
        net.finish_gradient_synchronization()
        optimizer.step()
    return model.state_dict()


def after(batches: Any, wrap: Callable[..., torchref.DataParallel]) -> Any:
    """With one that is there."""
    model = make_model()
    net = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(net, local_rows(batch, dist.get_rank(), dist.get_world_size())).backward()
        net.finish_gradient_synchronization()
        optimizer.step()
    return model.state_dict()
