"""Blocks of a Llama in a loop, on TPUs that are not here: XLA moves their scatters less readily than simpler ones'."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from benchmarks.ports.llama_shapes import block
from jaxddp import targets

LAYERS, WIDTH, HIDDEN, HEADS, KV, HEAD, CONTEXT = 4, 512, 2048, 8, 2, 64, 512


@pytest.mark.full
def test_a_round_scatters_the_gradients_of_the_one_before():
    layer = jaxddp.layer(jax.checkpoint(block))

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, one: (layer(one, x), None), x.astype(jnp.bfloat16), params)[0] ** 2)

    shapes = {
        "norms": (2, WIDTH), "q": (WIDTH, HEADS, HEAD), "k": (WIDTH, KV, HEAD), "v": (WIDTH, KV, HEAD),
        "out": (HEADS, HEAD, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
    }  # fmt: skip
    params = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in shapes.items()}
    mesh, options = targets.mesh("v5p:8"), {"compute_dtype": jnp.bfloat16}
    trainer = jaxddp.Trainer(loss, optax.adamw(1e-3), jaxddp.zero3(), mesh, **options)
    batch = jax.ShapeDtypeStruct((8, CONTEXT, WIDTH), jnp.float32)
    found = jaxddp.collectives(trainer.compile(trainer.abstract_state(params), batch))
    # Of the backward's rounds XLA takes one out of the loop for gathers ahead of theirs, and one for scatters behind.
    scatters = found.in_loops("reduce-scatter")
    assert [(one.count, one.is_hidden) for one in scatters] == [(LAYERS - 2, True)], found
