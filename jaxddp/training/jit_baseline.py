"""The baseline of all strategies: plain ``jit`` with replicated parameters and a sharded batch.

XLA's partitioner adds the reductions, merges them, and schedules them by its own model of the network. The step
computes the same metrics as the trainer's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..communication.reduction import sum_of_squares
from ..scopes import OPTIMIZER_SCOPE
from .step import TrainState


def auto_step(
    loss_fn: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
    """Makes a training step to be jitted with a replicated state and a batch sharded by rank.

    It takes ``(state, batch)`` to the next state and the metrics, over the global batch.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        with jax.named_scope(OPTIMIZER_SCOPE):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            updated = optax.apply_updates(state.params, updates)
            metrics = {"loss": loss, "grad_norm": jnp.sqrt(sum_of_squares(jax.tree.leaves(grads)))}
        return TrainState(state.step + 1, updated, opt_state, state.key), metrics

    return step
