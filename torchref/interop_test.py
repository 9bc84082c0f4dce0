import numpy as np
import pytest
from torch import nn

from torchref.interop import from_numpy, to_numpy


class Tied(nn.Module):
    """Lists one parameter under two names, as language models with a tied head do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 2)
        self.head = nn.Linear(2, 7, bias=False)
        self.head.weight = self.embed.weight


def test_module_and_arrays_share_no_memory():
    module = nn.BatchNorm1d(3)
    arrays = to_numpy(module)
    assert arrays["num_batches_tracked"].dtype == np.int64
    arrays["running_mean"][:] = 9.0
    assert not module.running_mean.any()
    arrays["running_mean"].flags.writeable = False
    from_numpy(arrays, module)
    module.running_mean += 1.0
    assert (module.running_mean == 10.0).all() and (arrays["running_mean"] == 9.0).all()


def test_a_shared_parameter_is_listed_under_both_names_and_loads_from_one():
    module = Tied()
    arrays = to_numpy(module)
    assert list(arrays) == ["embed.weight", "head.weight"]
    filled = np.full((7, 2), 3.0, np.float32)
    for name in arrays:
        from_numpy({name: filled}, module)
        assert module.embed.weight is module.head.weight
        assert (module.embed.weight == 3.0).all()
        filled = filled.copy()
    with pytest.raises(ValueError, match="'head.weight' differs from 'embed.weight', to which it is tied$"):
        from_numpy({"embed.weight": filled, "head.weight": filled + 1}, module)
    with pytest.raises(ValueError, match="missing 'embed.weight'$"):
        from_numpy({}, module)


def test_the_error_lists_every_fault_and_nothing_is_loaded():
    module = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Linear(2, 3), "c": nn.LayerNorm(2, bias=False)})
    before = to_numpy(module)
    shapes = {"a.weight": (2, 3), "b.weight": (3, 2), "c.weight": 2, "d": 1}
    arrays = {name: np.zeros(shape, float if name == "c.weight" else np.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError) as error:
        from_numpy(arrays, module)
    assert str(error.value) == (
        "arrays must have the names, shapes and dtypes of module: unknown 'd'; 'a.weight' is float32 (2, 3), not "
        "float32 (3, 2); 'c.weight' is float64 (2,), not float32 (2,); missing 'b.bias'"
    )
    assert all(np.array_equal(array, before[name]) for name, array in to_numpy(module).items())
