"""A convolutional net in Flax NNX: ``nnx.Optimizer`` within ``nnx.jit``; images are noise in the shape of digits."""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxddp

STRATEGIES = ("bucketed", "zero2")


class Net(nnx.Module):
    """A convolution and two dense layers, of images ``[n, 12, 12, 1]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convolution = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(6 * 6 * 4, 32, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits, ``[n, 10]``."""
        x = nnx.avg_pool(nnx.relu(self.convolution(x)), (2, 2), strides=(2, 2))
        return self.head(nnx.relu(self.hidden(x.reshape(len(x), -1))))


def data() -> list[dict[str, np.ndarray]]:
    """Global batches of images and labels."""
    rng = np.random.default_rng(0)
    return [{"image": rng.normal(size=(16, 12, 12, 1)), "label": rng.integers(0, 10, 16)} for _ in range(4)]


def make_model() -> Net:
    """The model in float64."""
    model = Net(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype("float64"), nnx.state(model)))
    return model


def loss_fn(model: Net, batch: Any) -> jax.Array:
    """The mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


def before(batches: Any) -> Any:
    """On one device."""
    model = make_model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: Net, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    for batch in batches:
        train_step(model, optimizer, batch)
    return nnx.state(model, nnx.Param)


def after(batches: Any, strategy: jaxddp.Strategy, mesh: Any) -> Any:
    """On all devices."""
    model = make_model()
    loss, params, others = jaxddp.flax.from_nnx(model, loss_fn)
    optimizer = optax.sgd(0.1, momentum=0.9)
    trainer = jaxddp.Trainer(loss, optimizer, strategy, mesh, has_state=True)
    state = trainer.init(params, model_state=others)
    for batch in batches:
        state, _ = trainer.step(state, batch)
    nnx.update(model, trainer.params(state), trainer.model_state(state))
    return nnx.state(model, nnx.Param)
