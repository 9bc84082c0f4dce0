"""Small models, one for each corner case of data parallelism: plain, tied, frozen and unused parameters.

All are Linear without bias, ReLU, LayerNorm, Linear without bias.
"""

import torch
import torch.nn.functional as F
from torch import nn


def _linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(linear.weight, std=in_features**-0.5)  # N(0, 1 / fan_in), as of every matrix in both packages
    return linear


class ToyMLP(nn.Module):
    """Linear, ReLU, LayerNorm, Linear."""

    def __init__(self, in_features: int, hidden: int, out_features: int):
        super().__init__()
        self.up = _linear(in_features, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-5)
        self.down = _linear(hidden, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[batch, in_features]`` to ``[batch, out_features]``."""
        return self.down(self.norm(F.relu(self.up(x))))


class TiedToy(nn.Module):
    """One matrix ``tied [in_features, hidden]`` used twice: into the hidden width, and transposed out of it."""

    def __init__(self, in_features: int, hidden: int):
        super().__init__()
        self.tied = nn.Parameter(torch.randn(in_features, hidden) * in_features**-0.5)
        self.norm = nn.LayerNorm(hidden, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[batch, in_features]`` to ``[batch, out_features]``."""
        return self.norm(F.relu(x @ self.tied)) @ self.tied.T


class FrozenToy(nn.Module):
    """A first matrix that is not trained: ``frozen.weight`` is made with ``requires_grad=False``."""

    def __init__(self, in_features: int, hidden: int, out_features: int):
        super().__init__()
        self.frozen = _linear(in_features, hidden).requires_grad_(False)
        self.norm = nn.LayerNorm(hidden, eps=1e-5)
        self.down = _linear(hidden, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[batch, in_features]`` to ``[batch, out_features]``."""
        return self.down(self.norm(F.relu(self.frozen(x))))


class UnusedToy(ToyMLP):
    """A matrix in the middle that the forward never uses: the backward leaves its ``.grad`` None."""

    def __init__(self, in_features: int, hidden: int, out_features: int):
        nn.Module.__init__(self)
        self.up = _linear(in_features, hidden)
        self.unused = _linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-5)
        self.down = _linear(hidden, out_features)
