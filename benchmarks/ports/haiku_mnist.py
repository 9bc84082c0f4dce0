"""A perceptron in Haiku, with a moving average of its parameters; the images are noise in the shape of digits."""

from typing import Any

import haiku as hk
import jax
import numpy as np
import optax

import jaxddp

STRATEGIES = ("bucketed", "zero1")


def data() -> list[dict[str, np.ndarray]]:
    """Global batches of images and labels."""
    rng = np.random.default_rng(0)
    return [{"image": rng.normal(size=(16, 12, 12)), "label": rng.integers(0, 10, 16)} for _ in range(4)]


def forward(image: Any) -> Any:
    """Logits, ``[n, 10]``."""
    return hk.nets.MLP([48, 24, 10])(hk.Flatten()(image))


net: Any = hk.without_apply_rng(hk.transform(forward))


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """The mean cross-entropy."""
    logits = net.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def before(batches: Any) -> Any:
    """On one device."""
    optimizer = optax.adam(1e-2)
    params = net.init(jax.random.key(0), np.zeros((1, 12, 12)))
    opt_state, averages = optimizer.init(params), params

    @jax.jit
    def train_step(params: Any, opt_state: Any, averages: Any, batch: Any) -> tuple[Any, Any, Any]:
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        averages = optax.incremental_update(params, averages, step_size=0.01)
        return params, opt_state, averages

    for batch in batches:
        params, opt_state, averages = train_step(params, opt_state, averages, batch)
    return params, averages


def after(batches: Any, strategy: jaxddp.Strategy, mesh: Any) -> Any:
    """On all devices."""
    optimizer = optax.chain(optax.adam(1e-2), jaxddp.params_ema(0.99))
    trainer = jaxddp.Trainer(loss_fn, optimizer, strategy, mesh)
    state = trainer.init(net.init(jax.random.key(0), np.zeros((1, 12, 12))))
    for batch in batches:
        state, _ = trainer.step(state, batch)
    return trainer.params(state), trainer.params(trainer.averaged(state))
