"""Models by name, and the loss they are trained on. Nothing here communicates."""

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


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of ``log sum exp(logits) - logits[target]``, in nats, of ``[..., vocab]`` and ids ``[...]``."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long())


def loss_fn(model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> torch.Tensor:
    """The mean loss of a module, or a wrapper around one: cross-entropy for tokens, otherwise mean squared error.

    ``batch`` has integers ``tokens`` and ``targets [batch, length]``, or ``x [batch, in]`` and ``y [batch, out]``.
    """
    if "tokens" in batch:
        return cross_entropy(model(batch["tokens"]), batch["targets"])
    return F.mse_loss(model(batch["x"]), batch["y"])


def build(name_or_config: str | TransformerConfig, seed: int = 0) -> nn.Module:
    """Makes a model of float32 on the CPU; the global generator is left as it was.

    ``name_or_config`` is ``toy``, ``toy_tied``, ``toy_frozen``, ``toy_unused``, a name in ``SIZES``, or sizes.
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
