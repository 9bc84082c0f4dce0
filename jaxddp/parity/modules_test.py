"""Ports of a model with one fault each: the module that has it is named, and no one before it."""

from collections import OrderedDict

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from jaxddp.comparison_test import refusal
from jaxddp.parity import first_difference, mark

WIDTH = 6
BATCH = {"x": np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)}


class Twin(nn.Module):
    """What each of the models below is in PyTorch."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        for place, parameter in enumerate(self.parameters()):
            values = np.random.default_rng(place + 1).normal(size=parameter.shape)
            parameter.data = torch.from_numpy(values.astype(np.float32))

    def forward(self, x):
        x = self.norm(torch.tanh(self.inner(x)) * 1e-2)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm(name="norm")(jnp.tanh(linen.Dense(WIDTH, name="inner")(x)) * 1e-2)
        for place in range(2):
            x = jnp.tanh(linen.Dense(WIDTH, name=f"layers_{place}")(x))
        return x


class OfNnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.norm(jnp.tanh(self.inner(x)) * 1e-2)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def weights(twin, separator="."):
    """Of the twin, as Flax has them."""
    found = {}
    for name, value in twin.state_dict().items():
        path, _, kind = name.rpartition(".")
        array = value.numpy()
        kinds = {"weight": "scale" if array.ndim == 1 else "kernel", "bias": "bias"}
        found.setdefault(path.replace(".", separator), {})[kinds[kind]] = array.T if array.ndim == 2 else array
    return found


def linen_loss(params, batch):
    return jnp.mean(OfLinen().apply({"params": params}, batch["x"]) ** 2)


def torch_loss(module, batch):
    return (module(batch["x"]) ** 2).mean()


def compare(loss_fn, params, twin=None, **options):
    return first_difference(loss_fn, params, BATCH, twin or Twin(), torch_loss, **options)


def test_models_that_agree_are_not_apart():
    found = compare(linen_loss, weights(Twin(), "_"))
    assert found.first is None and not found.only_in_torch and not found.only_in_jax
    assert {one.name for one in found.compared} == {"", "inner", "norm", "layers.0", "layers.1"}
    assert {one.is_backward for one in found.compared} == {False, True}


def test_what_modules_gave_is_kept_where_the_next_operation_works_in_place():
    class InPlace(Twin):
        def forward(self, x):
            x = self.norm(self.inner(x).tanh_() * 1e-2)
            for layer in self.layers:
                x = layer(x).tanh_()
            return x

    assert compare(linen_loss, weights(Twin(), "_"), InPlace()).first is None


def test_a_transposed_weight_is_found_by_name_and_class():
    params = weights(Twin(), "_")
    params["layers_0"]["kernel"] = params["layers_0"]["kernel"].T
    found = compare(linen_loss, params)
    assert (found.first.name, found.first.kind, found.first.is_backward) == ("layers.0", "Linear", False)
    assert "layers.0 (Linear)" in str(found) and "APART" in str(found)


def test_a_wrong_epsilon_is_found_in_float64():
    found = compare(linen_loss, weights(Twin(), "_"), Twin(eps=1e-5))
    assert found.first.name == "norm" and 1e-9 < found.first.in_float64 < 1


def test_nnx_modules_have_the_names_under_which_they_are_held():
    model = OfNnx()
    graph, state = nnx.split(model)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    given = {f"{path}.{kind}": value for path, one in weights(Twin()).items() for kind, value in one.items()}
    assert set(flat) == set(given)
    params = nnx.from_flat_state([(path, leaf.replace(jnp.asarray(given[".".join(map(str, path))])))
                                  for path, leaf in nnx.to_flat_state(state)])  # fmt: skip

    def loss_fn(params, batch):
        return jnp.mean(nnx.merge(graph, params)(batch["x"]) ** 2)

    before = vars(nnx.Linear)["__call__"]
    found = compare(loss_fn, params)
    assert found.first is None and len(found.compared) == 10
    assert vars(nnx.Linear)["__call__"] is before


def marked_loss(params, batch, scale=1.0):
    x = mark("a", batch["x"] @ params["w"])
    return jnp.mean((mark("b", jnp.tanh(x) * scale)) ** 2)


def test_marks_find_a_fault_of_the_backward_alone():
    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()

        def forward(self, x):
            # The derivative of a is lost on the way back.
            x = self.a(x)
            return self.b(x * 0.5 + x.detach() * 0.5)

    module = Marked()
    params = {"w": module.a.weight.detach().numpy().T}
    found = compare(marked_loss, params, module)
    assert (found.first.name, found.first.is_backward) == ("a", True) and "gradient" in str(found.first)
    assert found.only_in_torch == ("",)
    # Outside of a comparison a mark is the value.
    assert float(marked_loss(params, BATCH)) > 0


def linear_and(name, **others):
    """A linear module of that name before others, and its weight as JAX has it."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    return nn.Sequential(OrderedDict({name: linear, **others})), {"w": linear.weight.detach().numpy().T}


def test_images_as_wide_as_their_channels_are_compared_in_torchs_layout():
    twin = nn.Sequential(OrderedDict(conv=nn.Conv2d(4, 4, 3, padding=1)))
    kernel, bias = (value.numpy() for value in twin.state_dict().values())
    params = {"conv": {"kernel": kernel.transpose(2, 3, 1, 0), "bias": bias}}

    class Images(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Conv(4, (3, 3), name="conv")(x)

    found = first_difference(
        lambda params, x: jnp.mean(Images().apply({"params": params}, x) ** 2), params,
        np.random.default_rng(0).normal(size=(2, 4, 4, 4)), twin,
        lambda module, x: (module(x.permute(0, 3, 1, 2)) ** 2).mean(),
    )  # fmt: skip
    assert len(found.compared) == 4 and found.first is None


def test_what_a_module_makes_of_its_parents_output_is_its_output():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class ScaledLinen(linen.Dense):
        def __call__(self, x):
            return super().__call__(x) * 2

    class ScaledNnx(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2

    class Masked(linen.Module):
        def __call__(self, x):
            return x > -1e9  # no gradient, and no output to compare

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jnp.where(Masked()(x), ScaledLinen(WIDTH, name="inner")(x), 0)

    class OuterNnx(nnx.Module):
        def __init__(self):
            self.inner = ScaledNnx(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.inner(x)

    twin = nn.Sequential(OrderedDict(inner=Scaled(WIDTH, WIDTH)))
    graph, state = nnx.split(OuterNnx())
    nnx.replace_by_pure_dict(state, {"inner": weights(twin)["inner"]})
    losses = {
        lambda params, batch: jnp.mean(Outer().apply({"params": params}, batch["x"]) ** 2): weights(twin),
        lambda params, batch: jnp.mean(nnx.merge(graph, params)(batch["x"]) ** 2): state,
    }
    for loss, params in losses.items():
        found = compare(loss, params, twin)
        assert found.first is None and not found.only_in_jax, found
        assert {one.name for one in found.compared} == {"", "inner"}


def test_marks_within_transformations_are_refused():
    def loss(params, batch):
        return linen_loss(params, batch) + jnp.mean(jax.vmap(lambda x: mark("inner", x))(batch["x"]))

    assert "must not lie within jax.checkpoint" in refusal(compare, loss, weights(Twin(), "_"))


def test_a_difference_in_the_dtype_alone_is_found():
    def loss_fn(params, batch):
        x = batch["x"] @ params["w"]
        is_wide = x.dtype == jnp.float64
        return jnp.mean(mark("a", x if is_wide else x.astype(jnp.bfloat16).astype(x.dtype)) ** 2)

    module, params = linear_and("a")
    found = compare(loss_fn, params, module)
    assert found.first.name == "a" and found.first.in_float64 < 1e-12 < found.first.in_dtype


def test_names_are_mapped_and_missing_ones_are_said():
    def loss_fn(params, batch):
        return jnp.mean(mark("a", batch["x"] @ params["w"]) ** 2)

    module, params = linear_and("up")
    assert compare(loss_fn, params, module, names={"up": "a"}).first is None
    found = refusal(compare, loss_fn, params, module)
    assert "counterpart" in found and "up" in found


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def test_a_module_that_returns_no_tensor_is_listed():
    def loss_fn(params, batch):
        return jnp.mean(mark("up", batch["x"] @ params["w"]) ** 2)

    module, params = linear_and("up", pair=Pair())
    theirs = lambda module, batch: (module(batch["x"])[0] ** 2).mean()  # noqa: E731
    found = first_difference(loss_fn, params, BATCH, module, theirs)
    assert found.first is None and found.only_in_torch == ("pair",)
