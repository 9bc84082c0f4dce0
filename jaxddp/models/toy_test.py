from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxddp.models.toy import FrozenToy, TiedToy, ToyMLP, UnusedToy

MAKERS = {
    "mlp": lambda rngs: ToyMLP(3, 8, 2, rngs=rngs),
    "tied": lambda rngs: TiedToy(3, 8, rngs=rngs),
    "frozen": lambda rngs: FrozenToy(3, 8, 2, rngs=rngs),
    "unused": lambda rngs: UnusedToy(3, 8, 2, rngs=rngs),
}


def reference(x, first, scale, bias, second):
    """Linear, ReLU, LayerNorm, Linear in NumPy float64."""
    hidden = np.maximum(x @ first, 0.0)
    centred = hidden - hidden.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return (normed * scale + bias) @ second


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
