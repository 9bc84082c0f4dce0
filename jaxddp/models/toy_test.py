from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxddp.models import FrozenToy, TiedToy, ToyMLP, UnusedToy

MAKERS = {
    "mlp": lambda rngs: ToyMLP(3, 8, 2, rngs=rngs),
    "tied": lambda rngs: TiedToy(3, 8, rngs=rngs),
    "frozen": lambda rngs: FrozenToy(3, 8, 2, rngs=rngs),
    "unused": lambda rngs: UnusedToy(3, 8, 2, rngs=rngs),
}
SHAPES = {
    "mlp": {"up.kernel": (3, 8), "norm.scale": (8,), "norm.bias": (8,), "down.kernel": (8, 2)},
    "tied": {"tied": (3, 8), "norm.scale": (8,), "norm.bias": (8,)},
    "frozen": {"frozen.kernel": (3, 8), "norm.scale": (8,), "norm.bias": (8,), "down.kernel": (8, 2)},
    "unused": {
        "up.kernel": (3, 8),
        "unused.kernel": (8, 8),
        "norm.scale": (8,),
        "norm.bias": (8,),
        "down.kernel": (8, 2),
    },
}


def reference(x, first, scale, bias, second):
    """Linear, ReLU, LayerNorm, Linear in NumPy float64."""
    hidden = np.maximum(x @ first, 0.0)
    centred = hidden - hidden.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return (normed * scale + bias) @ second


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_have_the_documented_names_and_shapes(name):
    state = nnx.state(MAKERS[name](nnx.Rngs(0)), nnx.Param)
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    assert shapes == SHAPES[name]


@pytest.mark.parametrize("name", MAKERS)
def test_forward_equals_numpy_in_float64(name):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        graph, state = nnx.split(MAKERS[name](nnx.Rngs(0)))
        state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), state)
        model: Any = nnx.merge(graph, state)
        if name == "tied":
            matrices = np.asarray(model.tied[...]), np.asarray(model.tied[...]).T
        else:
            first = model.frozen if name == "frozen" else model.up
            matrices = np.asarray(first.kernel[...]), np.asarray(model.down.kernel[...])
        x = rng.normal(size=(5, 3))
        got = model(jnp.asarray(x))
        assert got.dtype == jnp.float64
        expected = reference(
            x, matrices[0], np.asarray(model.norm.scale[...]), np.asarray(model.norm.bias[...]), matrices[1]
        )
        # Rounding of a few dozen float64 operations on values near 1.
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


def test_tied_matrix_is_one_leaf_with_the_gradient_of_both_uses():
    model = TiedToy(3, 8, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)

    def apart(first, second):
        return jnp.sum(model.norm(jax.nn.relu(x @ first)) @ second.T)

    tied = model.tied[...]
    first, second = jax.grad(apart, argnums=(0, 1))(tied, tied)
    both = jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x)))(state)["tied"][...]
    assert float(jnp.abs(first).max()) > 0.1 and float(jnp.abs(second).max()) > 0.1
    # The same float32 sum in two orders; values are near 1.
    np.testing.assert_allclose(both, first + second, rtol=0, atol=1e-5)


def test_unused_matrix_has_a_zero_gradient_and_the_others_do_not():
    graph, state = nnx.split(UnusedToy(3, 8, 2, rngs=nnx.Rngs(0)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    grads = jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x) ** 2))(state)
    largest = {".".join(map(str, path)): float(jnp.abs(leaf[...]).max()) for path, leaf in nnx.to_flat_state(grads)}
    assert largest.pop("unused.kernel") == 0.0
    assert min(largest.values()) > 0.0


def test_seed_decides_the_initial_values():
    first, again, other = (ToyMLP(3, 8, 2, rngs=nnx.Rngs(seed)).up.kernel[...] for seed in (0, 0, 1))
    assert jnp.array_equal(first, again)
    assert not jnp.array_equal(first, other)
