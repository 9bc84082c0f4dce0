"""A moving average of the parameters, as part of the optimizer: its state is sharded with the rest."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class EmaState(NamedTuple):
    """State of ``params_ema``."""

    ema: Any  # the average; a tree like the parameters


def params_ema(decay: float) -> optax.GradientTransformationExtraArgs:
    """Keeps a moving average of the parameters; put it last in ``optax.chain``.

        ema = decay * ema + (1 - decay) * params        after each update

    It starts at the parameters, so there is no bias to correct. ``Trainer.averaged`` gives a state of the averages, to
    evaluate or to read. Updates are passed on as they are. Raises a ValueError if ``decay`` is not from 0 to below 1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay (={decay!r}) must be at least 0 and below 1")

    def update(updates: Any, state: EmaState, params: Any = None, **extra_args: Any) -> tuple[Any, EmaState]:
        del extra_args
        if params is None:
            raise ValueError("params_ema must be given the parameters: call update(updates, state, params)")
        new = optax.apply_updates(params, updates)
        return updates, EmaState(optax.incremental_update(new, state.ema, 1 - decay))

    return optax.GradientTransformationExtraArgs(lambda params: EmaState(jax.tree.map(jnp.array, params)), update)
