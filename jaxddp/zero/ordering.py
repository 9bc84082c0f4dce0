"""Limits prefetch: at most three units' parameters are gathered, or wait for their scatter, at a time.

A model's data dependencies do not order its collectives: XLA may start the gathers of later units at once, or let the
backward run ahead of a reduce-scatter, and keep full tensors alive meanwhile. So an order token (see
``communication/reduction.py``) makes unit u wait for unit u - 3, and its gradient does the same for the backward:

    forward    shards of u           wait for  results of u - 3             so its gather runs beside u - 2 and u - 1
    backward   gradients into u - 3  wait for  scattered gradients of u     so its scatter runs beside u - 1 and u - 2

With two units instead, a gather that takes longer than the unit it runs beside would be waited for, though the next
unit may compute for longer than its own gather takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..communication.reduction import order_token, use_token


def first_tokens() -> list[Any]:
    """What the first three units of a program wait for: the first for nothing, the others for a number of their own.

    XLA would gather what two of them use once, and hold it.
    """
    return [None, order_token((), 1.0)[1], order_token((), 2.0)[1]]


def in_order(tokens: list[Any], unit: Callable[[list[jax.Array]], list[Any]], shards: list[jax.Array]) -> list[Any]:
    """Runs a unit whose shards wait for the results of the third last one.

    Args:
        tokens: Of the units before it; that of this one is added.
        unit: Of its shards.
        shards: Its parameters.

    Returns:
        The unit's results.
    """
    token = tokens[-3]
    if token is not None:
        shards, token = _on_floats(_wait, shards, token)
    results, after = _on_floats(_release, unit(shards), jnp.zeros(()))
    tokens.append(after)
    return results if token is None else _on_floats(_use, results, token)[0]


def _on_floats(function: Callable[..., Any], arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], Any]:
    """Calls ``function(arrays, token)`` on those that have gradients."""
    places = [place for place, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
    found, token = function([arrays[place] for place in places], token)
    arrays = list(arrays)
    for place, array in zip(places, found, strict=True):
        arrays[place] = array
    return arrays, token


@jax.custom_vjp
def _wait(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Arrays wait for the token; in the backward, the token for the gradients of the arrays."""
    return lax.optimization_barrier((arrays, token))


_wait.defvjp(lambda arrays, token: (_wait(arrays, token), None), lambda _, grads: lax.optimization_barrier(grads))


@jax.custom_vjp
def _release(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The token waits for the arrays; in the backward, the gradients of the arrays for the token."""
    return lax.optimization_barrier((arrays, token))


def _release_backward(_: None, grads: Any) -> tuple[list[jax.Array], jax.Array]:
    return _use(*lax.optimization_barrier(grads))


_release.defvjp(lambda arrays, token: (_release(arrays, token), None), _release_backward)


def _use(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    # XLA drops unused barrier outputs, so the token is used; one of the arrays will do.
    return [use_token(array, token) for array in arrays[:1]] + arrays[1:], token
