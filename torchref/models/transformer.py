"""A decoder-only transformer: pre-norm RMSNorm, RoPE, causal attention, SwiGLU, no biases, untied head.

A model of ``L`` blocks has ``9 L + 3`` parameters, registered in forward order. Their dtype is the compute dtype. The
RoPE tables are computed in float64 and rounded to it, once for each length; they are neither parameters nor buffers.

References:
    Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
    Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from jaxddp.sizes import TransformerConfig, config_of

ROPE_THETA = 10_000.0
NORM_EPS = 1e-5


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # whose tensors could not be used in training
def rotary_tables(
    length: int, head_size: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of RoPE's angles ``position * theta^(-2 i / head_size)``: ``[length, 1, head_size / 2]``."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size)
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None, None] * frequencies
    return torch.cos(angles).to(dtype), torch.sin(angles).to(dtype)


def rotate(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates features ``i`` and ``i + head_size / 2`` of ``[batch, length, heads, head_size]`` by their position."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(linear.weight, std=in_features**-0.5)  # N(0, 1 / fan_in), as of every matrix in both packages
    return linear


class Attention(nn.Module):
    """Causal self-attention over ``num_heads`` heads with rotary positions."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.query = _linear(config.width, config.width)
        self.key = _linear(config.width, config.width)
        self.value = _linear(config.width, config.width)
        self.output = _linear(config.width, config.width)

    def forward(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Maps ``[batch, length, width]`` to the same shape; a position attends to itself and earlier ones."""
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        query = rotate(self.query(x).view(heads), tables).transpose(1, 2)
        key = rotate(self.key(x).view(heads), tables).transpose(1, 2)
        value = self.value(x).view(heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.gate = _linear(config.width, config.hidden)
        self.up = _linear(config.width, config.hidden)
        self.down = _linear(config.hidden, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., width]`` to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each of a normalised input and added to the residual stream."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.mlp = FeedForward(config)

    def forward(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Maps ``[batch, length, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), tables)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The whole language model."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.head = _linear(config.width, config.vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps token ids ``[batch, length]``, at most the context, to logits of the next token, ``[..., vocab]``."""
        self.config.check_length(tokens.shape[1])
        x = self.embedding(tokens)
        tables = rotary_tables(x.shape[1], self.config.head_size, x.dtype, x.device)
        for layer in self.layers:
            x = layer(x, tables)
        return self.head(self.norm(x))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of ``log sum exp(logits) - logits[target]``, in nats, of ``[..., vocab]`` and ids ``[...]``."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long())


def loss_fn(model: Callable[[torch.Tensor], torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of a module, or a wrapper around one, over integers ``tokens`` and ``targets [batch, length]``."""
    return cross_entropy(model(batch["tokens"]), batch["targets"])


def build(name_or_config: str | TransformerConfig, seed: int = 0) -> Transformer:
    """Makes a model of float32 on the CPU; the global generator is left as it was.

    ``name_or_config`` is a name in ``SIZES``, or sizes.
    """
    config = config_of(name_or_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(config)
