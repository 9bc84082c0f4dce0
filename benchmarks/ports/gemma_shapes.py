"""Gemma 2 with 2B parameters, cut to 2 of 26 blocks, by shapes alone: tied embedding, capped logits, wide heads.

Before, ``jax.jit`` shards every matrix over the devices and XLA chooses what to communicate.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxddp

STRATEGIES = ("bucketed", "zero3")
NUM_BLOCKS, WIDTH, HIDDEN, VOCABULARY, NUM_HEADS, NUM_KV_HEADS, HEAD = 2, 2304, 9216, 256_128, 8, 4, 256
SHAPES = {
    "norms": (4, WIDTH), "q": (WIDTH, NUM_HEADS, HEAD), "kv": (2, WIDTH, NUM_KV_HEADS, HEAD),
    "out": (NUM_HEADS, HEAD, WIDTH), "gate": (2, WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
}  # fmt: skip


def data() -> tuple[Any, Any]:
    """Shapes of the parameters, and of a batch of 8 sequences of 512 tokens."""
    blocks = [{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}] * NUM_BLOCKS
    table, norm = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((VOCABULARY, WIDTH), (WIDTH,)))
    return {"blocks": blocks, "table": table, "norm": norm}, jax.ShapeDtypeStruct((8, 513), jnp.int32)


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """RMSNorm, whose scale is 1 plus the parameter."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * (1 + scale)


def cap(x: jax.Array, limit: float) -> jax.Array:
    """Keeps numbers within a limit, smoothly."""
    return limit * jnp.tanh(x / limit)


def block(p: Any, x: jax.Array) -> jax.Array:
    """Attention and a feed-forward, with norms before and after each; positions are left out."""
    normed = norm(p["norms"][0], x)
    q = jnp.einsum("bld,dnh->blnh", normed, p["q"]) * HEAD**-0.5
    k, v = jnp.repeat(jnp.einsum("bld,cdnh->cblnh", normed, p["kv"]), NUM_HEADS // NUM_KV_HEADS, 3)
    scores = cap(jnp.einsum("bqnh,bknh->bnqk", q, k), 50.0).astype(jnp.float32)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(x.dtype)
    x += norm(p["norms"][1], jnp.einsum("bnqk,bknh,nhd->bqd", weights, v, p["out"]))
    gate, up = jnp.einsum("bld,cdf->cblf", norm(p["norms"][2], x), p["gate"])
    return x + norm(p["norms"][3], (jax.nn.gelu(gate) * up) @ p["down"])


def loss_fn(params: Any, tokens: jax.Array, layer: Any = lambda fn: fn) -> jax.Array:
    """The mean cross-entropy; ``layer`` marks what is a layer."""
    x = layer(lambda table, tokens: table[tokens] * WIDTH**0.5)(params["table"], tokens[:, :-1])
    for one in params["blocks"]:
        x = layer(block)(one, x)
    x = norm(params["norm"], x)
    logits = layer(lambda table, x: cap((x @ table.T).astype(jnp.float32), 30.0))(params["table"], x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def before(data: Any, mesh: Any) -> Any:
    """Shapes of the state after a step of ``jax.jit`` with shardings."""
    params, batch = data
    optimizer = optax.adamw(1e-3)

    def sharding(leaf: Any) -> NamedSharding:
        largest = leaf.shape.index(max(leaf.shape)) if leaf.ndim > 1 else None
        spec = [None if dim != largest else "data" for dim in range(leaf.ndim)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        def mixed_loss(params: Any) -> jax.Array:
            return loss_fn(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), batch)

        loss, grads = jax.value_and_grad(mixed_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.eval_shape(optimizer.init, params)
    state_shardings = jax.tree.map(sharding, (params, opt_state))
    by_example = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(train_step, in_shardings=(*state_shardings, by_example), donate_argnums=(0, 1))
    return jax.eval_shape(step, params, opt_state, batch)


def after(data: Any, strategy: jaxddp.Strategy, mesh: Any) -> tuple[jaxddp.Trainer, Any, Any]:
    """A trainer, and the shapes of its state and batch."""
    params, batch = data
    marked = partial(loss_fn, layer=jaxddp.layer)
    trainer = jaxddp.Trainer(marked, optax.adamw(1e-3), strategy, mesh, compute_dtype=jnp.bfloat16)
    return trainer, trainer.abstract_state(params), batch
