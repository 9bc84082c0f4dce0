"""A GPT in equinox: ``eqx.filter_jit``, cosine schedule, clipping, and micro-batches in a ``lax.scan``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxddp

STRATEGIES = ("bucketed", "zero3")
WIDTH, NUM_HEADS, CONTEXT, VOCABULARY, NUM_MICROBATCHES = 16, 2, 8, 32, 2


class Block(eqx.Module):
    """Attention and a feed-forward, each after a norm, of one sequence ``[length, width]``."""

    norm: Any
    attention: Any
    mlp: Any

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(NUM_HEADS, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next activations."""
        normed = jax.vmap(self.norm)(x)
        x = x + self.attention(normed, normed, normed, jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(lambda one: self.mlp(self.norm(one)))(x)


class GPT(eqx.Module):
    """Two blocks between two matrices, of tokens ``[n, length]``."""

    embedding: jax.Array
    blocks: list[Block]
    head: jax.Array

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.embedding, self.head = jax.random.normal(keys[0], (2, VOCABULARY, WIDTH)) / 4
        self.blocks = [Block(one) for one in keys[2:]]

    def __call__(self, tokens: jax.Array, layer: Callable[[Any], Any] = lambda fn: fn) -> jax.Array:
        """Logits; ``layer`` marks what is a layer."""
        x = layer(lambda table, tokens: table[tokens])(self.embedding, tokens)
        for block in self.blocks:
            x = layer(lambda block, x: jax.vmap(block)(x))(block, x)
        return layer(lambda matrix, x: x @ matrix.T)(self.head, x)


def data() -> list[dict[str, np.ndarray]]:
    """Global batches of tokens and those that follow them."""
    texts = np.random.default_rng(0).integers(0, VOCABULARY, (4, 16, CONTEXT + 1))
    return [{"tokens": text[:, :-1], "targets": text[:, 1:]} for text in texts]


def loss_fn(model: GPT, batch: Any, **options: Any) -> jax.Array:
    """The mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"], **options), batch["targets"]).mean()


def before(batches: Any) -> Any:
    """On one device."""
    model = GPT(jax.random.key(0))
    adamw = optax.adamw(optax.cosine_decay_schedule(1e-2, 100), b2=0.95)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def train_step(model: GPT, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        params, static = eqx.partition(model, eqx.is_array)
        pieces = jax.tree.map(lambda leaf: leaf.reshape(NUM_MICROBATCHES, -1, *leaf.shape[1:]), batch)

        def add_up(grads: Any, piece: Any) -> tuple[Any, None]:
            more = jax.grad(lambda params: loss_fn(eqx.combine(params, static), piece))(params)
            return jax.tree.map(jnp.add, grads, more), None

        grads, _ = jax.lax.scan(add_up, jax.tree.map(jnp.zeros_like, params), pieces)
        grads = jax.tree.map(lambda grad: grad / NUM_MICROBATCHES, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state

    for batch in batches:
        model, opt_state = train_step(model, opt_state, batch)
    return eqx.filter(model, eqx.is_array)


def after(batches: Any, strategy: jaxddp.Strategy, mesh: Any) -> Any:
    """On all devices."""
    params, static = eqx.partition(GPT(jax.random.key(0)), eqx.is_array)
    marked = partial(loss_fn, layer=jaxddp.layer)
    trainer = jaxddp.Trainer(
        lambda params, batch: marked(eqx.combine(params, static), batch),
        optax.adamw(optax.cosine_decay_schedule(1e-2, 100), b2=0.95),
        strategy,
        mesh,
        num_microbatches=NUM_MICROBATCHES,
        max_grad_norm=1.0,
    )
    state = trainer.init(params)
    for batch in batches:
        state, _ = trainer.step(state, batch)
    return trainer.params(state)
