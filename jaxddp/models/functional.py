"""Models by name, each as a loss function and its parameters: nested dictionaries, named as the modules are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sizes import SIZES, TransformerConfig
from .transformer import Transformer

Params = Any
Batch = dict[str, jax.Array]
Loss = Callable[[Params, Batch], jax.Array]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over tokens of ``log sum exp(logits [..., vocab]) - logits[targets [...]]``, in nats; all targets count."""
    # Comparing every id with the target keeps the gradient elementwise; an indexed read would make it a scatter.
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target_logits)


def loss_fn(model: Callable[[jax.Array], jax.Array], batch: Batch) -> jax.Array:
    """The mean loss of a model over a batch of integers, ``{"tokens", "targets": [batch, length]}``."""
    return cross_entropy(model(batch["tokens"]), batch["targets"])


def build(name_or_config: str | TransformerConfig, seed: int = 0) -> tuple[Loss, Params]:
    """Makes a model's loss function, ``(params, batch)`` to the mean loss, and initial parameters in float32.

    ``name_or_config`` is a name in ``SIZES``, or sizes.

    Example:
        >>> loss_fn, params = build("tiny")
        >>> tokens = jnp.zeros((2, 16), int)
        >>> loss_fn(params, {"tokens": tokens, "targets": tokens}).shape
        ()
    """
    return _functional(Transformer(_config(name_or_config), rngs=nnx.Rngs(seed)))


def abstract(name_or_config: str | TransformerConfig) -> tuple[Loss, Params]:
    """Like ``build``, with ``jax.ShapeDtypeStruct`` for every parameter: nothing is computed or allocated."""
    config = _config(name_or_config)
    return _functional(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def _config(name_or_config: str | TransformerConfig) -> TransformerConfig:
    config = SIZES.get(name_or_config) if isinstance(name_or_config, str) else name_or_config
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"unknown model {name_or_config!r}: one of {', '.join(SIZES)}")
    return config


def _functional(model: Transformer) -> tuple[Loss, Params]:
    """Splits a module into a function of its parameters and those parameters."""
    graph, state = nnx.split(model, nnx.Param)
    return lambda params, batch: loss_fn(nnx.merge(graph, params), batch), nnx.to_pure_dict(state)
