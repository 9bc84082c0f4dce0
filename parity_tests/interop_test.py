"""Layers copied between Flax and PyTorch, in both directions, compute the same."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from flax import nnx
from torch import nn

from jaxddp.checkpoint import interop as in_jax
from torchref import interop as in_torch
from torchref.interop_test import Tied


class FlaxNet(nnx.Module):
    """Every supported layer: 3-d, 2-d and 1-d convolutions with groups, norms, an embedding, a plain parameter."""

    def __init__(self, rngs):
        double = {"param_dtype": jnp.float64, "rngs": rngs}
        self.volume = nnx.Conv(2, 4, (2, 3, 3), padding="VALID", **double)
        self.image = nnx.Conv(4, 6, (3, 5), strides=(2, 1), padding=((1, 1), (2, 2)), feature_group_count=2, **double)
        self.line = nnx.Conv(6, 8, (3,), padding="VALID", use_bias=False, **double)
        self.layer_norm = nnx.LayerNorm(8, epsilon=1e-5, use_fast_variance=False, **double)
        self.rms_norm = nnx.RMSNorm(8, epsilon=1e-5, **double)
        self.embed = nnx.Embed(5, 8, **double)
        self.dense = nnx.List([nnx.Linear(8, 3, **double)])
        self.own = nnx.Param(jnp.ones((2, 3), jnp.float64))

    def __call__(self, x, ids):
        x = self.volume(x).mean(axis=1)
        x = self.line(self.image(x).mean(axis=1))
        x = self.rms_norm(self.layer_norm(x)) + self.embed(ids)[:, None]
        return self.dense[0](x).mean(axis=1) @ self.own[...].T


class TorchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.volume = nn.Conv3d(2, 4, (2, 3, 3))
        self.image = nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(1, 2), groups=2)
        self.line = nn.Conv1d(6, 8, 3, bias=False)
        self.layer_norm = nn.LayerNorm(8, eps=1e-5)
        self.rms_norm = nn.RMSNorm(8, eps=1e-5)
        self.embed = nn.Embedding(5, 8)
        self.dense = nn.ModuleList([nn.Linear(8, 3)])
        self.own = nn.Parameter(torch.ones(2, 3))

    def forward(self, x, ids):
        x = self.volume(x).mean(dim=2)
        x = self.line(self.image(x).mean(dim=2)).transpose(1, 2)
        x = self.rms_norm(self.layer_norm(x)) + self.embed(ids)[:, None]
        return self.dense[0](x).mean(dim=1) @ self.own.T


def randomised(arrays):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=array.shape) for name, array in arrays.items()}


def test_a_user_defined_network_computes_the_same_in_torch_and_comes_back():
    with jax.enable_x64(True):
        graph, state = nnx.split(FlaxNet(nnx.Rngs(0)), nnx.Param)
        net = TorchNet().double()
        state = in_jax.from_numpy(randomised(in_jax.to_numpy(state)), state)
        in_torch.from_numpy(in_jax.to_numpy(state), net)
        jax.tree.map(np.testing.assert_array_equal, in_jax.from_numpy(net.state_dict(), state), state)

        x = np.random.default_rng(1).normal(size=(3, 4, 9, 7, 2))
        ids = np.asarray([0, 4, 2])
        got = nnx.merge(graph, state)(jnp.asarray(x), jnp.asarray(ids))
        expected = net(torch.from_numpy(x.transpose(0, 4, 1, 2, 3)), torch.from_numpy(ids)).detach().numpy()
        assert np.abs(expected).max() > 1.0
        # Float64 roundings of sums of at most 60 products.
        np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=1e-12)


def test_bfloat16_tensors_keep_their_bits():
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(ml_dtypes.bfloat16)
    finite = values[np.isfinite(values.astype(np.float32))]
    module = nn.LayerNorm(len(finite), bias=False).to(torch.bfloat16)
    in_torch.from_numpy({"weight": jnp.asarray(finite)}, module)
    like = {"scale": jax.ShapeDtypeStruct(finite.shape, jnp.bfloat16)}
    for source in (module.state_dict(), in_torch.to_numpy(module)):
        back = np.asarray(in_jax.from_numpy(source, like)["scale"])
        assert np.array_equal(back.view(np.uint16), finite.view(np.uint16))


def test_a_parameter_that_torch_lists_twice_is_one_leaf_in_jax():
    module = Tied()
    like = {"embed": {"embedding": jax.ShapeDtypeStruct((7, 2), jnp.float32)}}
    arrays = module.state_dict()
    del arrays["head.weight"]
    params = in_jax.from_numpy(arrays, like)
    assert np.array_equal(params["embed"]["embedding"], module.embed.weight.detach().numpy())
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    before = module.head.weight.detach().clone()
    # It loads without the alias: torch knows that both names are one parameter.
    in_torch.from_numpy(in_jax.to_numpy(doubled), module)
    assert torch.equal(module.head.weight, 2 * before)
