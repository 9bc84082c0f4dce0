"""Models by name, and the loss they are trained on.

The loss calls ``module(...)``, so it takes a wrapped module too. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from jaxddp.sizes import SIZES, TransformerConfig

from .toy import FrozenToy, TiedToy, ToyMLP, UnusedToy
from .transformer import Transformer

_TOYS: dict[str, Callable[[], nn.Module]] = {
    "toy": lambda: ToyMLP(10, 16, 5),
    "toy_tied": lambda: TiedToy(10, 16),
    "toy_frozen": lambda: FrozenToy(10, 16, 5),
    "toy_unused": lambda: UnusedToy(10, 16, 5),
}

Batch = dict[str, torch.Tensor]


def mean_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean of the squared difference over all elements."""
    return F.mse_loss(output, target)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of ``log sum exp(logits) - logits[target]``, in nats; stable for logits of any size.

    ``logits`` are ``[..., vocab]``, ``targets`` token ids ``[...]`` of any integer dtype; there is no ``ignore_index``.
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long())


def loss_fn(model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> torch.Tensor:
    """The mean loss of a model over a batch: cross-entropy for tokens, otherwise mean squared error.

    Args:
        model: A module or a wrapper around one.
        batch: ``{"tokens": [batch, length], "targets": [batch, length]}`` of integers for a language model,
            ``{"x": [batch, in_features], "y": [batch, out_features]}`` for a toy.
    """
    if "tokens" in batch:
        return cross_entropy(model(batch["tokens"]), batch["targets"])
    return mean_squared_error(model(batch["x"]), batch["y"])


def build(name_or_config: str | TransformerConfig, seed: int = 0) -> nn.Module:
    """Makes a model with its initial parameters.

    ``name_or_config`` is ``toy``, ``toy_tied``, ``toy_frozen``, ``toy_unused``, a name in ``SIZES``, or sizes. The
    module is of float32 on the CPU; the global generator is left as it was.

    Raises:
        ValueError: If the name is not known.
    """
    make = _TOYS.get(name_or_config) if isinstance(name_or_config, str) else None
    config = SIZES.get(name_or_config) if isinstance(name_or_config, str) else name_or_config
    if isinstance(config, TransformerConfig):
        make = partial(Transformer, config)
    if make is None:
        raise ValueError(f"unknown model {name_or_config!r}: one of {', '.join([*_TOYS, *SIZES])}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
