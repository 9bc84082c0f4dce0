"""Keeps units in line: at most two are gathered, or wait for their gradients to be scattered, at a time.

Nothing in a model's arithmetic says that the gathers of later units should not start at once, or that a reduce-scatter
should end before the backward goes on; a compiler may do either, and hold what is whole meanwhile. So unit u is linked
to unit u - 2 by a number, which is 0 and stands in barriers only:

    forward    shards of u         wait for  results of u - 2               so its gather runs beside unit u - 1
    backward   gradients into u - 2  wait for  scattered gradients of u     so its scatter runs beside unit u - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_REACH = 2


class Links:
    """The chain of the units of one program, in the order in which they run."""

    def __init__(self) -> None:
        """Starts a chain without units."""
        self._tokens: list[jax.Array] = []

    def before(self, shards: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], jax.Array | None]:
        """Lets the next unit's shards wait.

        Args:
            shards: Of the unit.

        Returns:
            The same, and what to give to ``after``.
        """
        return _wait(list(shards), self._tokens[-_REACH]) if len(self._tokens) >= _REACH else (shards, None)

    def after(self, results: Sequence[jax.Array], waited: jax.Array | None) -> list[jax.Array]:
        """Ends the unit.

        Args:
            results: Of the unit.
            waited: From ``before``.

        Returns:
            The same results, to be used instead.
        """
        floating = [place for place, result in enumerate(results) if jnp.issubdtype(result.dtype, jnp.floating)]
        tied, token = _release([results[place] for place in floating], jnp.zeros(()))
        self._tokens.append(token)
        replaced = dict(zip(floating, tied if waited is None else _use(tied, waited), strict=True))
        return [replaced.get(place, result) for place, result in enumerate(results)]


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
    # What comes out of a barrier and is not used is dropped from it.
    return [arrays[0] + lax.stop_gradient(token).astype(arrays[0].dtype), *arrays[1:]] if arrays else arrays
