"""Dynamic loss scaling: float16 has no numbers below 6e-8, so gradients are computed of a loss times ``scale``.

    gradients of scale * loss, divided by scale where they are divided by the number of examples

    =====================  ============================================  ============
    step                   scale of the next step                        ``num_finite``
    =====================  ============================================  ============
    finite                 the same; twice it after ``GROWTH_STEPS``     + 1, then 0
    not finite: skipped    half of it, at least 1                        0
    =====================  ============================================  ============

Loss and gradient norm are equal on all ranks, and so is the scale. It is a power of two: without overflow and underflow
it changes no bit.

References:
    Micikevicius et al., Mixed Precision Training, ICLR 2018 (section 3.2).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


class LossScale(NamedTuple):
    """What the loss is multiplied by, and the finite steps since that changed."""

    scale: jax.Array  # shape=(), dtype=float32
    num_finite: jax.Array  # shape=(), dtype=int32


def first_scale() -> LossScale:
    """Makes the scale of step 0."""
    return LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0))


def next_scale(state: LossScale, is_finite: jax.Array) -> LossScale:
    """Gives the scale after a step."""
    num_finite = jnp.where(is_finite, state.num_finite + 1, 0)
    grows = num_finite >= GROWTH_STEPS
    factor = jnp.where(is_finite, jnp.where(grows, 2.0, 1.0), 0.5).astype(jnp.float32)
    return LossScale(jnp.maximum(state.scale * factor, 1), jnp.where(grows, 0, num_finite))
