"""Small models, one for each corner case of data parallelism: plain, tied, frozen and unused parameters.

All are Linear without bias, ReLU, LayerNorm, Linear without bias. ``build`` and ``loss_fn`` are those of
``torchref.models``, and know the toys as well.
"""

import torch
import torch.nn.functional as F
from torch import nn

from torchref import models
from torchref.models.transformer import _linear


class ToyMLP(nn.Module):
    """If asked, with a matrix that the forward never uses: the backward leaves its ``.grad`` None."""

    def __init__(self, in_features: int, hidden: int, out_features: int, has_unused=False):
        super().__init__()
        self.up = _linear(in_features, hidden)
        if has_unused:
            self.unused = _linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-5)
        self.down = _linear(hidden, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(F.relu(self.up(x))))


class TiedToy(nn.Module):
    """One matrix ``tied [in_features, hidden]`` used twice: into the hidden width, and transposed out of it."""

    def __init__(self, in_features: int, hidden: int):
        super().__init__()
        self.tied = nn.Parameter(torch.randn(in_features, hidden) * in_features**-0.5)
        self.norm = nn.LayerNorm(hidden, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.relu(x @ self.tied)) @ self.tied.T


class FrozenToy(nn.Module):
    """A first matrix that is not trained: ``frozen.weight`` is made with ``requires_grad=False``."""

    def __init__(self, in_features: int, hidden: int, out_features: int):
        super().__init__()
        self.frozen = _linear(in_features, hidden).requires_grad_(False)
        self.norm = nn.LayerNorm(hidden, eps=1e-5)
        self.down = _linear(hidden, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(F.relu(self.frozen(x))))


TOYS = {
    "toy": lambda: ToyMLP(10, 16, 5),
    "toy_tied": lambda: TiedToy(10, 16),
    "toy_frozen": lambda: FrozenToy(10, 16, 5),
    "toy_unused": lambda: ToyMLP(10, 16, 5, has_unused=True),
}


def build(name, seed=0):
    if name not in TOYS:
        return models.build(name, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TOYS[name]()


def loss_fn(model, batch):
    return models.loss_fn(model, batch) if "tokens" in batch else F.mse_loss(model(batch["x"]), batch["y"])
