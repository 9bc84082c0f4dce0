"""Limits prefetch: at most three units' parameters are gathered, or wait for their scatter, at a time.

A model's data dependencies do not order its collectives: XLA may start the gathers of later units at once, or let the
backward run ahead of a reduce-scatter, and keep full tensors alive meanwhile. So an order token (see
``communication/reduction.py``) makes unit u wait for unit u - 3, and its gradient does the same for the backward:

    forward    shards of u           wait for  results of u - 3             so its gather runs beside u - 2 and u - 1
    backward   gradients into u - 3  wait for  scattered gradients of u     so its scatter runs beside u - 1 and u - 2
               shards of u           wait for  gradients into u + 1         so its second gather runs beside u + 1
               a loop of units       waits for scattered gradients of the unit after it

With two units instead, a gather that takes longer than the unit it runs beside would be waited for, though the next
unit may compute for longer than its own gather takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..communication.reduction import order_token
from .gather import put


def _first_tokens() -> list[Any]:
    # XLA would gather what two of the first three units use once, and hold it, if they waited for the same.
    return [None, order_token((), 1.0)[1], order_token((), 2.0)[1]]


@dataclass
class Order:
    """What the units of a program have left for those after them.

    Attributes:
        tokens: Of each unit, available after its results.
        early: Of the last unit, if the backward computes it again: its gradient comes before that of its results.
        of_loop: Of a loop just before, whose backward waits for its gradient.
    """

    tokens: list[Any] = field(default_factory=_first_tokens)
    early: Any = None
    of_loop: Any = None


def in_order(order: Order, unit: Callable[..., tuple[list[Any], Any]], shards: list[jax.Array]) -> list[Any]:
    """Runs a unit whose shards wait for the results of the third last one.

    Args:
        order: Of the units before it; what this one leaves is added.
        unit: ``shards -> (results, early)``, where ``early`` is None if the backward does not gather for it.
        shards: Its parameters.

    Returns:
        The unit's results.
    """
    token, early = order.tokens[-3], order.early
    if order.of_loop is not None:
        shards, order.of_loop = _on_floats(_give_back, shards, order.of_loop)[0], None
    if token is not None:
        shards, token = _on_floats(_wait, shards, token)
    results, order.early = unit(shards)
    results, after = _on_floats(_release, results, jnp.zeros(()))
    order.tokens.append(after)
    if early is not None:
        results, _ = _on_floats(_give_back, results, early)
    return results if token is None else _on_floats(_use, results, token)[0]


def after_loop(order: Order, carry: list[Any]) -> list[Any]:
    """What a loop over units hands on, whose backward begins once the gradients of the unit after it are scattered.

    They are while that unit computes the gradients of its results. Once a loop has begun, in which units scatter as
    well, XLA would scatter them after it.
    """
    carry, order.of_loop = _on_floats(_release, carry, jnp.zeros(()))
    return carry


def computed_again(compute: Callable[..., list[Any]], policy: Any) -> Callable[..., tuple[list[Any], jax.Array]]:
    """A unit of which the backward gathers the parameters again, and computes what the forward has not kept.

    The barrier of ``jax.checkpoint`` makes all inputs of a backward wait for each other, the shards for the gradients
    of the results too. Here they wait for the gradient of ``early`` alone, which the next unit gives as it begins.

    Args:
        compute: ``(shards, arrays) -> results``.
        policy: What the forward keeps; see ``jax.checkpoint``.

    Returns:
        ``(shards, arrays) -> (results, early)``.
    """
    checkpointed = jax.checkpoint(compute, policy=policy, prevent_cse=False)

    def unit(shards: list[Any], arrays: list[Any]) -> tuple[list[Any], jax.Array]:
        return checkpointed(shards, arrays), jnp.zeros(())

    def forward(shards: list[Any], arrays: list[Any]) -> tuple[Any, Any]:
        values = [one.value for one in (*shards, *arrays)]
        places = [place for place, one in enumerate((*shards, *arrays)) if one.perturbed]

        def of_perturbed(some: list[Any]) -> list[Any]:
            every = put(values, places, some)
            return checkpointed(every[: len(shards)], every[len(shards) :])

        results, pull = jax.vjp(of_perturbed, [values[place] for place in places])
        wanted = [[() if one.perturbed else None for one in some] for some in (shards, arrays)]
        return (results, jnp.zeros(())), (pull, wanted)

    def backward(kept: Any, grads: tuple[list[Any], Any]) -> tuple[list[Any], ...]:
        (pull, wanted), (of_results, early) = kept, grads
        held, structure = jax.tree.flatten(pull)
        # Without a unit after it, nothing is early: what is held waits for the gradients.
        if isinstance(early, SymbolicZero):
            _, early = order_token([grad for grad in of_results if not isinstance(grad, SymbolicZero)], 0.0)
        pull = jax.tree.unflatten(structure, _on_floats(_hold, held, early)[0])
        found = iter(pull(_instantiated(of_results))[0])
        return tuple([None if one is None else next(found) for one in some] for some in wanted)

    marked = jax.custom_vjp(unit)
    marked.defvjp(forward, backward, symbolic_zeros=True)
    return marked


def _instantiated(grads: list[Any]) -> list[Any]:
    def zeros(grad: SymbolicZero) -> Any:
        is_float0 = grad.dtype == jax.dtypes.float0
        return (np if is_float0 else jnp).zeros(grad.shape, grad.dtype)

    return [zeros(grad) if isinstance(grad, SymbolicZero) else grad for grad in grads]


def _on_floats(function: Callable[..., Any], arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], Any]:
    """Calls ``function(arrays, token)`` on those that have gradients."""
    places = [place for place, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
    found, token = function([arrays[place] for place in places], token)
    return put(arrays, places, found), token


@jax.custom_vjp
def _wait(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Arrays wait for the token; in the backward, the token for the gradients of the arrays."""
    return lax.optimization_barrier((arrays, token))


_wait.defvjp(lambda arrays, token: (_wait(arrays, token), None), lambda _, grads: lax.optimization_barrier(grads))


@jax.custom_vjp
def _give_back(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The arrays; in the backward, the gradient of the token is a zero that waits for theirs."""
    return arrays, token


_give_back.defvjp(lambda arrays, token: ((arrays, token), None), lambda _, grads: lax.optimization_barrier(grads))


@jax.custom_vjp
def _release(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The token waits for the arrays; in the backward, the gradients of the arrays for the token."""
    return lax.optimization_barrier((arrays, token))


def _hold(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The arrays wait for the token."""
    return _use(*lax.optimization_barrier((arrays, token)))


_release.defvjp(lambda arrays, token: (_release(arrays, token), None), lambda _, grads: _hold(*grads))


def _use(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    # XLA drops unused barrier outputs, so the token is used; one of the arrays will do. It gets no gradient.
    return [array + lax.stop_gradient(token).astype(array.dtype) for array in arrays[:1]] + arrays[1:], token
