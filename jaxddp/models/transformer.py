"""A decoder-only transformer: pre-norm RMSNorm, RoPE, causal attention, SwiGLU, no biases, untied head.

A model of ``L`` blocks has ``9 L + 3`` parameters. Their dtype is the compute dtype.

References:
    Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
    Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..sizes import TransformerConfig, config_of
from ..zero import layer

Params = Any
Loss = Callable[[Params, dict[str, jax.Array]], jax.Array]

# One distribution for every matrix of both packages: N(0, 1 / fan_in), and N(0, 1 / width) for the embedding.
_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
_embedding_init = nnx.initializers.variance_scaling(1.0, "fan_out", "normal")

ROPE_THETA = 10_000.0
NORM_EPS = 1e-5


def rotary_tables(length: int, head_size: int, dtype: jax.typing.DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines ``[length, 1, head_size / 2]`` of RoPE's angles ``position * theta^(-2 i / head_size)``."""
    frequencies = ROPE_THETA ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    angles = np.arange(length, dtype=np.float64)[:, None, None] * frequencies
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rotate(x: jax.Array, tables: tuple[np.ndarray, np.ndarray]) -> jax.Array:
    """Turns features ``i`` and ``i + head_size / 2`` of ``x [batch, length, num_heads, head_size]`` by their angle."""
    cos, sin = tables
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class _Linear(nnx.Linear):
    """A linear layer that joins every dim but the last before it multiplies."""

    # The kernel's gradient would contract two dims at once, for which XLA:CPU has no fast product: 1/5 slower.
    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return super().__call__(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.out_features)


_linear = partial(_Linear, use_bias=False, kernel_init=_init)
_rms_norm = partial(nnx.RMSNorm, epsilon=NORM_EPS)


class Attention(nnx.Module):
    """Causal self-attention over ``num_heads`` heads with rotary positions."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.query = _linear(config.width, config.width, rngs=rngs)
        self.key = _linear(config.width, config.width, rngs=rngs)
        self.value = _linear(config.width, config.width, rngs=rngs)
        self.output = _linear(config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array, tables: tuple[np.ndarray, np.ndarray]) -> jax.Array:
        """Maps ``[batch, length, width]`` to the same shape; a position sees itself and those before it."""
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        query = rotate(self.query(x).reshape(heads), tables).swapaxes(1, 2) * heads[-1] ** -0.5
        key = rotate(self.key(x).reshape(heads), tables).swapaxes(1, 2)
        value = self.value(x).reshape(heads).swapaxes(1, 2)
        visible = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(visible, query @ key.swapaxes(2, 3), -jnp.inf)
        # Softmax, divided by its sum only after the values are mixed: one [length, length] array less to keep.
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        mixed = weights @ value / weights.sum(axis=-1, keepdims=True)
        return self.output(mixed.swapaxes(1, 2).reshape(x.shape))


class FeedForward(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gate = _linear(config.width, config.hidden, rngs=rngs)
        self.up = _linear(config.width, config.hidden, rngs=rngs)
        self.down = _linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., width]`` to the same shape."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: attention and feed-forward, each behind its norm and added to the residual stream."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _rms_norm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _rms_norm(config.width, rngs=rngs)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x: jax.Array, tables: tuple[np.ndarray, np.ndarray]) -> jax.Array:
        """Maps ``[batch, length, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), tables)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    """The whole language model; ``zero3`` gathers embedding, each block, and the head with its norm one at a time."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(config.vocab, config.width, embedding_init=_embedding_init, rngs=rngs)
        # Embed fixes its output dtype when it is made; None lets the parameter decide, as in every other layer.
        self.embedding.dtype = None
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = _rms_norm(config.width, rngs=rngs)
        self.head = _linear(config.width, config.vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps token ids ``[batch, length]`` to logits of the next token, ``[batch, length, vocab]``."""
        self.config.check_length(tokens.shape[1])
        x = layer(lambda embedding, tokens: embedding(tokens))(self.embedding, tokens)
        tables = rotary_tables(tokens.shape[1], self.config.head_size, x.dtype)
        run_block = layer(lambda block, x: block(x, tables))
        for block in self.layers:
            x = run_block(block, x)
        return layer(lambda head, norm, x: head(norm(x)))(self.head, self.norm, x)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over tokens of ``log sum exp(logits [..., vocab]) - logits[targets [...]]``, in nats; all targets count."""
    # Comparing every id with the target keeps the gradient elementwise; an indexed read would make it a scatter.
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target_logits)


def build(name_or_config: str | TransformerConfig, seed: int = 0) -> tuple[Loss, Params]:
    """Makes a model's loss function, ``(params, batch)`` to the mean loss, and initial parameters in float32.

    Parameters are nested dictionaries; a batch is integers, ``{"tokens", "targets": [batch, length]}``.
    """
    return _functional(Transformer(config_of(name_or_config), rngs=nnx.Rngs(seed)))


def abstract(name_or_config: str | TransformerConfig) -> tuple[Loss, Params]:
    """Like ``build``, with ``jax.ShapeDtypeStruct`` for every parameter: nothing is computed or allocated."""
    config = config_of(name_or_config)
    return _functional(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def _functional(model: Transformer) -> tuple[Loss, Params]:
    """Splits a module into a function of its parameters and those parameters, named as the modules are."""
    graph, state = nnx.split(model, nnx.Param)

    def loss_fn(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(batch["tokens"]), batch["targets"])

    return loss_fn, nnx.to_pure_dict(state)
