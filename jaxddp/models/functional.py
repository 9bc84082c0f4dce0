"""Models by name, each as a loss function and its parameters: nested dictionaries of arrays, named as the modules are.

A toy is one unit of ``zero3``; a transformer marks its own (``transformer.py``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sizes import SIZES, TransformerConfig
from ..zero import layer
from .toy import FrozenToy, TiedToy, ToyMLP, UnusedToy
from .transformer import Transformer

_TOYS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "toy": lambda rngs: ToyMLP(10, 16, 5, rngs=rngs),
    "toy_tied": lambda rngs: TiedToy(10, 16, rngs=rngs),
    "toy_frozen": lambda rngs: FrozenToy(10, 16, 5, rngs=rngs),
    "toy_unused": lambda rngs: UnusedToy(10, 16, 5, rngs=rngs),
}

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
    """The mean loss of a model, or any function of the inputs, over a batch.

    Cross-entropy of integers ``{"tokens", "targets": [batch, length]}``, or mean-squared error of ``{"x", "y"}``.
    """
    if "tokens" in batch:
        return cross_entropy(model(batch["tokens"]), batch["targets"])
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def build(name_or_config: str | TransformerConfig, seed: int = 0) -> tuple[Loss, Params]:
    """Makes a model's loss function, ``(params, batch)`` to the mean loss, and initial parameters in float32.

    ``name_or_config`` is ``toy``, ``toy_tied``, ``toy_frozen``, ``toy_unused``, a name in ``SIZES``, or sizes.

    Example:
        >>> loss_fn, params = build("tiny")
        >>> tokens = jnp.zeros((2, 16), int)
        >>> loss_fn(params, {"tokens": tokens, "targets": tokens}).shape
        ()
    """
    return _functional(_constructor(name_or_config)(nnx.Rngs(seed)))


def abstract(name_or_config: str | TransformerConfig) -> tuple[Loss, Params]:
    """Like ``build``, with ``jax.ShapeDtypeStruct`` for every parameter: nothing is computed or allocated."""
    make = _constructor(name_or_config)
    return _functional(nnx.eval_shape(lambda: make(nnx.Rngs(0))))


def _constructor(name_or_config: str | TransformerConfig) -> Callable[[nnx.Rngs], nnx.Module]:
    if isinstance(name_or_config, str) and name_or_config in _TOYS:
        return _TOYS[name_or_config]
    config = SIZES.get(name_or_config) if isinstance(name_or_config, str) else name_or_config
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"unknown model {name_or_config!r}: one of {', '.join([*_TOYS, *SIZES])}")
    return lambda rngs: Transformer(config, rngs=rngs)


def _functional(model: nnx.Module) -> tuple[Loss, Params]:
    """Splits a module into a function of its parameters and those parameters."""
    graph, state = nnx.split(model, nnx.Param)

    def loss_of_params(params: Params, batch: Batch) -> jax.Array:
        model = nnx.merge(graph, params)
        return loss_fn(model if isinstance(model, Transformer) else partial(_toy_unit, model), batch)

    return loss_of_params, nnx.to_pure_dict(state)


@layer
def _toy_unit(model: Any, x: jax.Array) -> jax.Array:
    return model(x)
