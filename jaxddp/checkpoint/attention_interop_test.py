"""Kernels of attention have three dimensions, as those of convolutions: they are refused, not transposed."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxddp.checkpoint.interop import from_numpy, to_numpy


@pytest.mark.parametrize("use_bias", [True, False])
def test_multi_head_attention_is_refused(use_bias):
    module = nnx.MultiHeadAttention(num_heads=2, in_features=8, use_bias=use_bias, decode=False, rngs=nnx.Rngs(0))
    state = nnx.state(module, nnx.Param)
    with pytest.raises(ValueError, match=r"'query\.kernel' .*attention"):
        to_numpy(state)
    with pytest.raises(ValueError, match=r"'query\.kernel' .*attention"):
        from_numpy({}, state)


def test_linear_general_is_refused_by_its_bias():
    module = nnx.LinearGeneral(8, (2, 4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"'kernel' .*bias"):
        to_numpy(nnx.state(module, nnx.Param))


def test_attention_of_matrices_and_convolutions_pass():
    matrices = {name: {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)} for name in ("query", "key", "value", "out")}
    assert {array.shape for array in to_numpy(matrices).values()} == {(6, 4), (6,)}
    conv = nnx.state(nnx.Conv(3, 5, (7,), rngs=nnx.Rngs(0)), nnx.Param)
    assert to_numpy(conv)["weight"].shape == (5, 3, 7)
    assert isinstance(to_numpy(conv)["bias"], np.ndarray)
