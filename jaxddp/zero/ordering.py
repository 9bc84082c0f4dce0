"""Limits prefetch: at most two units' parameters are gathered, or wait for their scatter, at a time.

A model's data dependencies do not order its collectives: XLA may start the gathers of later units at once, or let the
backward run ahead of a reduce-scatter, and keep full tensors alive meanwhile. So an order token (see
``communication/ordering.py``) makes unit u wait for unit u - 2, and its gradient does the same for the backward:

    forward    shards of u           wait for  results of u - 2               so its gather runs beside unit u - 1
    backward   gradients into u - 2  wait for  scattered gradients of u       so its scatter runs beside unit u - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..communication.ordering import use_token

_REACH = 2


class UnitOrder:
    """Order tokens of the units that have run so far."""

    def __init__(self) -> None:
        """Starts without units."""
        self._tokens: list[jax.Array] = []
        self._unordered: list[jax.Array] = []  # shards of units that wait for none

    def before(self, shards: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], jax.Array | None]:
        """Makes the next unit's shards wait for the results of the second last unit.

        Args:
            shards: The unit's parameters.

        Returns:
            The shards, to be used instead, and the token to give to ``after``.
        """
        if len(self._tokens) >= _REACH:
            return _wait(list(shards), self._tokens[-_REACH])
        is_again = any(shard is other for shard in shards for other in self._unordered)
        self._unordered += shards
        if not is_again:
            return shards, None
        # XLA would gather what two units share once, and hold it: a number of its own makes the second one another.
        number = float(len(self._unordered))
        arrays, hidden = _wait(list(shards), jnp.asarray(number, jnp.float32))
        return arrays, hidden - number

    def after(self, results: Sequence[jax.Array], waited: jax.Array | None) -> list[jax.Array]:
        """Makes the token of a unit that has run.

        Args:
            results: What the unit computed.
            waited: The token from ``before``.

        Returns:
            The results, to be used instead.
        """
        results = list(results)
        places = [place for place, result in enumerate(results) if jnp.issubdtype(result.dtype, jnp.floating)]
        arrays, token = _release([results[place] for place in places], jnp.zeros(()))
        self._tokens.append(token)
        for place, array in zip(places, arrays if waited is None else _use(arrays, waited), strict=True):
            results[place] = array
        return results


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
    arrays, token = lax.optimization_barrier(grads)
    return _use(arrays, token), token


_release.defvjp(lambda arrays, token: (_release(arrays, token), None), _release_backward)


def _use(arrays: list[jax.Array], token: jax.Array) -> list[jax.Array]:
    # XLA drops unused barrier outputs, so the token is used; one of the arrays will do.
    return [use_token(arrays[0], token), *arrays[1:]] if arrays else arrays
