"""Order tokens: a zero that XLA cannot fold, used to order operations that do not depend on each other.

XLA keeps only the order that data dependencies require, and it computes equal expressions once. Where B must not start
before A has ended, A passes an optimization barrier together with a number, and B adds the barrier's output less that
number. The difference is 0, but XLA cannot know this, and it is not available before A is:

    a, token = order_token(a)        token = 0, available when a is
    b = use_token(b, token)          b + token: what uses b waits for a

XLA drops barrier outputs that nothing uses, and the order with them: the token must be used. Barriers around different
numbers also keep XLA from merging operations that it can prove equal, such as the reductions of two equal buckets.

There are three uses:

    communication/reduction.py   buckets are divided in the order of the plan, and on GPUs packed in it; none is divided
                                 before all are packed, that is before the backward ends; equal ones are each reduced
    training/step.py             every micro-batch gathers parameters anew, instead of all of them before the loop
    zero/ordering.py             at most three units' parameters are gathered, or wait to be scattered, at a time
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def order_token(values: Any, number: jax.typing.ArrayLike = 0) -> tuple[Any, jax.Array]:
    """Makes a zero that is available no earlier than some arrays.

    Equal arrays are not merged if their numbers differ.

    Returns:
        The arrays, to be used instead, and the token, a scalar of value 0.
    """
    values, hidden = lax.optimization_barrier((values, jnp.int32(number) if isinstance(number, int) else number))
    return values, hidden - number


def use_token(array: jax.Array, token: jax.Array) -> jax.Array:
    """Makes an array wait for a token, and pass no gradient to it."""
    return array + lax.stop_gradient(token).astype(array.dtype)
