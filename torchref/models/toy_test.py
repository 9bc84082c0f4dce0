import numpy as np
import pytest
import torch

from torchref.models import FrozenToy, TiedToy, ToyMLP, UnusedToy

MAKERS = {
    "mlp": lambda: ToyMLP(3, 8, 2),
    "tied": lambda: TiedToy(3, 8),
    "frozen": lambda: FrozenToy(3, 8, 2),
    "unused": lambda: UnusedToy(3, 8, 2),
}
SHAPES = {
    "mlp": {"up.weight": (8, 3), "norm.weight": (8,), "norm.bias": (8,), "down.weight": (2, 8)},
    "tied": {"tied": (3, 8), "norm.weight": (8,), "norm.bias": (8,)},
    "frozen": {"frozen.weight": (8, 3), "norm.weight": (8,), "norm.bias": (8,), "down.weight": (2, 8)},
    "unused": {
        "up.weight": (8, 3),
        "unused.weight": (8, 8),
        "norm.weight": (8,),
        "norm.bias": (8,),
        "down.weight": (2, 8),
    },
}


def reference(x, first, scale, bias, second):
    """Linear, ReLU, LayerNorm, Linear in NumPy float64."""
    hidden = np.maximum(x @ first, 0.0)
    centred = hidden - hidden.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return (normed * scale + bias) @ second


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_have_the_documented_names_and_shapes_in_order(name):
    module = MAKERS[name]()
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert list(shapes.items()) == list(SHAPES[name].items())
    assert list(module.state_dict()) == list(shapes)


@pytest.mark.parametrize("name", MAKERS)
def test_forward_equals_numpy_in_float64(name):
    rng = np.random.default_rng(0)
    module = MAKERS[name]().double()
    weights = {}
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            weights[key] = rng.normal(size=tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(weights[key]))
    if name == "tied":
        matrices = weights["tied"], weights["tied"].T
    else:
        matrices = weights["frozen.weight" if name == "frozen" else "up.weight"].T, weights["down.weight"].T
    x = rng.normal(size=(5, 3))
    got = module(torch.from_numpy(x)).detach().numpy()
    assert got.dtype == np.float64
    expected = reference(x, matrices[0], weights["norm.weight"], weights["norm.bias"], matrices[1])
    # Rounding of a few dozen float64 operations on values near 1.
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


def test_tied_matrix_is_one_parameter_with_the_gradient_of_both_uses():
    torch.manual_seed(0)
    module = TiedToy(3, 8)
    x = torch.randn(5, 3)
    first, second = (module.tied.detach().clone().requires_grad_() for _ in range(2))
    (module.norm(torch.relu(x @ first)) @ second.T).sum().backward()
    module(x).sum().backward()
    assert first.grad is not None and second.grad is not None
    assert first.grad.abs().max() > 0.1 and second.grad.abs().max() > 0.1
    # The same float32 sum in two orders; values are near 1.
    torch.testing.assert_close(module.tied.grad, first.grad + second.grad, rtol=0, atol=1e-5)


def test_only_the_frozen_matrix_is_frozen():
    flags = {name: parameter.requires_grad for name, parameter in FrozenToy(3, 8, 2).named_parameters()}
    assert flags.pop("frozen.weight") is False
    assert all(flags.values())


def test_only_the_unused_matrix_gets_no_gradient():
    module = UnusedToy(3, 8, 2)
    module(torch.randn(5, 3)).square().sum().backward()
    assert [name for name, parameter in module.named_parameters() if parameter.grad is None] == ["unused.weight"]
