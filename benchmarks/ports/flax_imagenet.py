"""A residual net in Flax Linen under ``jax.pmap``, with BatchNorm over all devices and an L2 penalty in the loss."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training.train_state import TrainState

import jaxddp

STRATEGIES = ("overlapped", "zero1")


class ResNet(nn.Module):
    """A residual block and a head, of images ``[n, 8, 8, 3]``."""

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool = True) -> jax.Array:
        """Logits, ``[n, 10]``."""
        skip = nn.Conv(8, (1, 1), strides=2)(x)
        for stride in (2, 1):
            x = nn.Conv(8, (3, 3), strides=stride, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(not is_training, axis_name="data")(x))
        return nn.Dense(10)((x + skip).mean((1, 2)))


model = ResNet()


def data() -> list[dict[str, np.ndarray]]:
    """Global batches of images and labels."""
    rng = np.random.default_rng(0)
    return [{"image": rng.normal(size=(16, 8, 8, 3)), "label": rng.integers(0, 10, 16)} for _ in range(4)]


def make_variables() -> tuple[Any, Any]:
    """Parameters and running statistics in float64."""
    variables = model.init(jax.random.key(0), np.zeros((1, 8, 8, 3)), is_training=False)
    variables = jax.tree.map(lambda leaf: leaf.astype("float64"), variables)
    return variables["params"], variables["batch_stats"]


def loss_fn(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, Any]:
    """Mean cross-entropy and penalty, and the next statistics."""
    variables = {"params": params, "batch_stats": batch_stats}
    logits, changed = model.apply(variables, batch["image"], mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
    return loss + 5e-5 * penalty, changed["batch_stats"]


def before(batches: Any) -> Any:
    """On one device, though the program is for several."""
    devices = jax.local_devices()[:1]

    class State(TrainState):
        batch_stats: Any

    params, stats = make_variables()
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    state: Any = State.create(apply_fn=model.apply, params=params, tx=optimizer, batch_stats=stats)
    state = jax_utils.replicate(state, devices)

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = grad_fn(state.params, state.batch_stats, batch)
        grads = jax.lax.pmean(grads, "data")
        return state.apply_gradients(grads=grads, batch_stats=stats), jax.lax.pmean(loss, "data")

    train_on_devices = jax.pmap(train_step, axis_name="data", devices=devices, donate_argnums=0)
    mean_over_devices = jax.pmap(lambda stats: jax.lax.pmean(stats, "data"), axis_name="data", devices=devices)
    for batch in batches:
        batch = {name: leaf.reshape(len(devices), -1, *leaf.shape[1:]) for name, leaf in batch.items()}  # noqa: PLW2901
        state, _ = train_on_devices(state, batch)
    state = state.replace(batch_stats=mean_over_devices(state.batch_stats))
    return jax.tree.map(lambda leaf: leaf[0], (state.params, state.batch_stats))


def after(batches: Any, strategy: jaxddp.Strategy, mesh: Any) -> Any:
    """On all devices."""
    params, stats = make_variables()
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    trainer = jaxddp.Trainer(loss_fn, optimizer, strategy, mesh, has_state=True)
    state = trainer.init(params, model_state=stats)
    for batch in batches:
        state, _ = trainer.step(state, batch)
    return trainer.params(state), trainer.model_state(state)
