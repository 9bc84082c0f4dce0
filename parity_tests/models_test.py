"""Models of both packages are the same functions: the same weights give the same loss and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxddp.models
import torchref.models
from jaxddp.checkpoint import interop as in_jax
from jaxddp.comparison_test import mostly_full
from jaxddp.models import toy_test as toys_in_jax
from torchref import interop as in_torch
from torchref.models import toy_test as toys_in_torch

from .inputs import batches

# Float64: the frameworks sum in another order, which costs a few roundings of values near 1.
ATOL = 1e-12


@pytest.mark.sample
@pytest.mark.parametrize(
    "name", ["toy", "toy_tied", "toy_frozen", "toy_unused", "tiny", pytest.param("byte", marks=pytest.mark.full)]
)
def test_same_weights_give_same_loss_and_gradients(name):
    with jax.enable_x64(True):
        loss_fn, params = toys_in_jax.build(name, seed=1)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        module = toys_in_torch.build(name, seed=2).double()
        of_torch = in_jax.from_numpy(in_torch.to_numpy(module), params)
        in_torch.from_numpy(in_jax.to_numpy(params), module)
        back = toys_in_torch.build(name, seed=2).double().state_dict()
        for key, array in in_jax.to_numpy(of_torch).items():  # to JAX and back: every bit as it was
            assert np.array_equal(array, back[key].numpy()), key

        batch = batches(name, "float64")[0]
        loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, jax.tree.map(jnp.asarray, batch))
        torch_loss = toys_in_torch.loss_fn(module, {key: torch.from_numpy(array) for key, array in batch.items()})
        torch_loss.backward()
        assert loss.dtype == jnp.float64 and torch_loss.dtype == torch.float64
        assert abs(float(loss) - torch_loss.item()) < ATOL

        grads = in_jax.to_numpy(grads)
        assert set(grads) == set(module.state_dict())
        for key, parameter in module.named_parameters():
            if key == "frozen.weight":
                assert parameter.grad is None and grads[key].any()
            elif key == "unused.weight":
                assert parameter.grad is None and not grads[key].any()
            else:
                assert parameter.grad is not None
                np.testing.assert_allclose(grads[key], parameter.grad.numpy(), rtol=0, atol=ATOL, err_msg=key)


QUICK = ("tiny", "byte", "byte_shallow", "lm_9m")


@pytest.mark.parametrize("name", mostly_full(QUICK, jaxddp.models.SIZES))
def test_parameters_have_the_same_names_and_shapes_at_every_size(name):
    with torch.device("meta"):
        module = torchref.models.build(name)
    arrays = {key: jax.ShapeDtypeStruct(tuple(p.shape), np.float32) for key, p in module.named_parameters()}
    params = jaxddp.models.abstract(name)[1]
    ours = in_jax.torch_leaves(params)
    for key, (dims, leaf) in ours.items():
        assert arrays.pop(key) == jax.ShapeDtypeStruct(tuple(leaf.shape[dim] for dim in dims), leaf.dtype)
    assert not arrays


@pytest.mark.parametrize("name", ["toy", "toy_tied", "tiny"])
def test_initial_values_have_the_same_standard_deviation(name):
    arrays = in_jax.to_numpy(toys_in_jax.build(name)[1])
    for key, array in in_torch.to_numpy(toys_in_torch.build(name)).items():
        if array.size >= 256:
            # Two samples of at least 256 normal numbers: their standard deviations differ by 6 % at one sigma.
            assert 0.75 < array.std() / arrays[key].std() < 1.33, key
        elif array.ndim == 1:
            assert np.array_equal(array, arrays[key]), key
