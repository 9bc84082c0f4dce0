"""Models by name, and the loss they are trained on. Nothing here communicates."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from jaxddp.sizes import SIZES, TransformerConfig

from .transformer import Transformer

Batch = dict[str, torch.Tensor]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of ``log sum exp(logits) - logits[target]``, in nats, of ``[..., vocab]`` and ids ``[...]``."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long())


def loss_fn(model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> torch.Tensor:
    """The mean loss of a module, or a wrapper around one, over integers ``tokens`` and ``targets [batch, length]``."""
    return cross_entropy(model(batch["tokens"]), batch["targets"])


def build(name_or_config: str | TransformerConfig, seed: int = 0) -> Transformer:
    """Makes a model of float32 on the CPU; the global generator is left as it was.

    ``name_or_config`` is a name in ``SIZES``, or sizes.
    """
    config = SIZES.get(name_or_config) if isinstance(name_or_config, str) else name_or_config
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"unknown model {name_or_config!r}: one of {', '.join(SIZES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(config)
