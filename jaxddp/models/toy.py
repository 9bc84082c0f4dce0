"""Small models, one for each corner case of data parallelism: plain, tied, frozen and unused parameters.

All are Linear without bias, ReLU, LayerNorm, Linear without bias. The parameters' dtype is the compute dtype.
"""

import jax
import jax.numpy as jnp
from flax import nnx

# One distribution for every matrix of both packages: N(0, 1 / fan_in).
_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


def _linear(in_features: int, out_features: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(in_features, out_features, use_bias=False, kernel_init=_init, rngs=rngs)


def _layer_norm(features: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # Flax's defaults (eps 1e-6, one-pass variance) are not PyTorch's; these are.
    return nnx.LayerNorm(features, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class ToyMLP(nnx.Module):
    """Linear, ReLU, LayerNorm, Linear."""

    def __init__(self, in_features: int, hidden: int, out_features: int, *, rngs: nnx.Rngs):
        self.up = _linear(in_features, hidden, rngs)
        self.norm = _layer_norm(hidden, rngs)
        self.down = _linear(hidden, out_features, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, in_features]`` to ``[batch, out_features]``."""
        return self.down(self.norm(jax.nn.relu(self.up(x))))


class TiedToy(nnx.Module):
    """One matrix ``tied [in_features, hidden]`` used twice: into the hidden width, and transposed out of it.

    The matrix is one leaf: its gradient is the sum over both uses and is communicated once.
    """

    def __init__(self, in_features: int, hidden: int, *, rngs: nnx.Rngs):
        self.tied = nnx.Param(_init(rngs.params(), (in_features, hidden), jnp.float32))
        self.norm = _layer_norm(hidden, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, in_features]`` to ``[batch, in_features]``."""
        tied = self.tied[...]
        return self.norm(jax.nn.relu(x @ tied)) @ tied.T


class FrozenToy(nnx.Module):
    """A first matrix that is not trained, if the trainer's ``trainable`` is false on the path ``frozen.kernel``."""

    def __init__(self, in_features: int, hidden: int, out_features: int, *, rngs: nnx.Rngs):
        self.frozen = _linear(in_features, hidden, rngs)
        self.norm = _layer_norm(hidden, rngs)
        self.down = _linear(hidden, out_features, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, in_features]`` to ``[batch, out_features]``."""
        return self.down(self.norm(jax.nn.relu(self.frozen(x))))


class UnusedToy(ToyMLP):
    """A matrix ``unused [hidden, hidden]`` in the middle that the forward never uses: its gradient is zero."""

    def __init__(self, in_features: int, hidden: int, out_features: int, *, rngs: nnx.Rngs):
        self.up = _linear(in_features, hidden, rngs)
        self.unused = _linear(hidden, hidden, rngs)
        self.norm = _layer_norm(hidden, rngs)
        self.down = _linear(hidden, out_features, rngs)
