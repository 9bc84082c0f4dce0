"""Small models, one for each corner case of data parallelism: plain, tied, frozen and unused parameters.

All are Linear without bias, ReLU, LayerNorm, Linear without bias. The parameters' dtype is the compute dtype.
``build`` and ``abstract`` are those of ``jaxddp.models``, and know the toys as well: each is one unit of ``zero3``.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxddp import models
from jaxddp.zero import layer

# One distribution for every matrix of both packages: N(0, 1 / fan_in).
_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


def _linear(in_features: int, out_features: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(in_features, out_features, use_bias=False, kernel_init=_init, rngs=rngs)


def _layer_norm(features: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # Flax's defaults (eps 1e-6, one-pass variance) are not PyTorch's; these are.
    return nnx.LayerNorm(features, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class ToyMLP(nnx.Module):
    """If asked, with a matrix ``unused [hidden, hidden]`` that the forward never uses: its gradient is zero."""

    def __init__(self, in_features: int, hidden: int, out_features: int, has_unused=False, *, rngs: nnx.Rngs):
        self.up = _linear(in_features, hidden, rngs)
        if has_unused:
            self.unused = _linear(hidden, hidden, rngs)
        self.norm = _layer_norm(hidden, rngs)
        self.down = _linear(hidden, out_features, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.norm(jax.nn.relu(self.up(x))))


class TiedToy(nnx.Module):
    """One matrix ``tied [in_features, hidden]`` used twice: into the hidden width, and transposed out of it."""

    def __init__(self, in_features: int, hidden: int, *, rngs: nnx.Rngs):
        self.tied = nnx.Param(_init(rngs.params(), (in_features, hidden), jnp.float32))
        self.norm = _layer_norm(hidden, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        tied = self.tied[...]
        return self.norm(jax.nn.relu(x @ tied)) @ tied.T


class FrozenToy(nnx.Module):
    """A first matrix that is not trained, if the trainer's ``trainable`` is false on the path ``frozen.kernel``."""

    def __init__(self, in_features: int, hidden: int, out_features: int, *, rngs: nnx.Rngs):
        self.frozen = _linear(in_features, hidden, rngs)
        self.norm = _layer_norm(hidden, rngs)
        self.down = _linear(hidden, out_features, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.norm(jax.nn.relu(self.frozen(x))))


TOYS = {
    "toy": lambda rngs: ToyMLP(10, 16, 5, rngs=rngs),
    "toy_tied": lambda rngs: TiedToy(10, 16, rngs=rngs),
    "toy_frozen": lambda rngs: FrozenToy(10, 16, 5, rngs=rngs),
    "toy_unused": lambda rngs: ToyMLP(10, 16, 5, has_unused=True, rngs=rngs),
}


def build(name, seed=0):
    return _functional(TOYS[name](nnx.Rngs(seed))) if name in TOYS else models.build(name, seed)


def abstract(name):
    return _functional(nnx.eval_shape(lambda: TOYS[name](nnx.Rngs(0)))) if name in TOYS else models.abstract(name)


def _functional(model):
    graph, state = nnx.split(model, nnx.Param)
    unit = layer(lambda model, x: model(x))

    def mean_squared_error(params, batch):
        return jnp.mean((unit(nnx.merge(graph, params), batch["x"]) - batch["y"]) ** 2)

    return mean_squared_error, nnx.to_pure_dict(state)


@pytest.mark.parametrize("name", [*TOYS, "tiny"])
def test_abstract_is_build_without_values(name):
    params, shapes = build(name)[1], abstract(name)[1]
    assert jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params) == shapes
