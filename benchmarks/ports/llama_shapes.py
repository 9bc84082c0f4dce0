"""A Llama of 1B parameters, cut to 2 of 16 blocks, by shapes alone: grouped queries, RoPE, checkpointed blocks.

Before, ``jax.shard_map`` replicates parameters and optimizer state, and all-reduces each gradient by ``pmean``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import jaxddp

STRATEGIES = ("zero1", "zero3")
NUM_BLOCKS, WIDTH, HIDDEN, VOCABULARY, NUM_HEADS, NUM_KV_HEADS, HEAD = 2, 2048, 8192, 128_256, 32, 8, 64
SHAPES = {
    "norms": (2, WIDTH), "q": (WIDTH, NUM_HEADS, HEAD), "k": (WIDTH, NUM_KV_HEADS, HEAD),
    "v": (WIDTH, NUM_KV_HEADS, HEAD), "out": (NUM_HEADS, HEAD, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}  # fmt: skip


def data() -> tuple[Any, Any]:
    """Shapes of the parameters in float32, and of a batch of 8 sequences of 512 tokens."""
    named = {f"block{index}": SHAPES for index in range(NUM_BLOCKS)}
    named |= {"embedding": {"table": (VOCABULARY, WIDTH)}, "head": {"norm": (WIDTH,), "matrix": (WIDTH, VOCABULARY)}}
    params = {
        layer: {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        for layer, shapes in named.items()
    }
    return params, jax.ShapeDtypeStruct((8, 513), jnp.int32)


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """RMSNorm."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def turn(x: jax.Array) -> jax.Array:
    """RoPE of queries or keys ``[n, length, heads, head]``."""
    angles = jnp.arange(x.shape[1])[:, None, None] * 500_000.0 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    (first, second), cos, sin = jnp.split(x, 2, -1), jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def block(p: Any, x: jax.Array) -> jax.Array:
    """Attention and a feed-forward, each after a norm."""
    normed = norm(p["norms"][0], x)
    q, k, v = (jnp.einsum("bld,dnh->blnh", normed, p[name]) for name in ("q", "k", "v"))
    attended = jax.nn.dot_product_attention(turn(q), turn(k), v, is_causal=True)
    x += jnp.einsum("blnh,nhd->bld", attended, p["out"])
    normed = norm(p["norms"][1], x)
    return x + (jax.nn.silu(normed @ p["gate"]) * (normed @ p["up"])) @ p["down"]


def loss_fn(params: Any, tokens: jax.Array, layer: Any = lambda fn: fn) -> jax.Array:
    """The mean cross-entropy; ``layer`` marks what is a layer."""
    x = layer(lambda p, tokens: p["table"][tokens])(params["embedding"], tokens[:, :-1])
    for index in range(NUM_BLOCKS):
        x = layer(jax.checkpoint(block))(params[f"block{index}"], x)
    logits = layer(lambda p, x: norm(p["norm"], x) @ p["matrix"])(params["head"], x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def before(data: Any, mesh: Any) -> Any:
    """Shapes of the state after a step of ``jax.shard_map``."""
    params, batch = data
    optimizer = optax.adamw(1e-3)

    def mixed_loss(params: Any, batch: Any) -> jax.Array:
        return loss_fn(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), batch)

    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(mixed_loss)(params, batch)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.eval_shape(optimizer.init, params)
    specs: dict[str, Any] = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    step = jax.jit(jax.shard_map(train_step, mesh=mesh, check_vma=False, **specs), donate_argnums=(0, 1))
    return jax.eval_shape(step, params, opt_state, batch)


def after(data: Any, strategy: jaxddp.Strategy, mesh: Any) -> tuple[jaxddp.Trainer, Any, Any]:
    """A trainer, and the shapes of its state and batch."""
    params, batch = data
    marked = partial(loss_fn, layer=jaxddp.layer)
    trainer = jaxddp.Trainer(marked, optax.adamw(1e-3), strategy, mesh, compute_dtype=jnp.bfloat16)
    return trainer, trainer.abstract_state(params), batch
