"""Turns what a loss function returns into totals and weights, which can be summed over ranks and micro-batches.

Each rank and micro-batch sees part of the batch. Sums of parts can be added, means cannot. So every loss becomes a
total and a weight, and the division happens once, after both have been summed:

    loss = sum(total) / sum(weight)        gradient = sum(d total / d params) / sum(weight)

A plain mean has no weight: all parts hold equally many examples, so its sum is divided by the number of parts, which
is known at compile time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Weighted(NamedTuple):
    """A total and the weight it must be divided by, such as summed token losses and the number of tokens.

    Attributes:
        total: Sum over the examples at hand, a scalar.
        weight: Its weight, a scalar; 0 if nothing counts.

    Example:
        >>> def loss_fn(params, batch):
        ...     error = (batch["x"] * params["w"] - batch["y"]) ** 2
        ...     return Weighted(jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"]))
    """

    total: jax.Array
    weight: jax.Array


class Part(NamedTuple):
    """A summand: a total and its weight, None if every summand counts alike."""

    total: jax.Array
    weight: jax.Array | None


class Parts(NamedTuple):
    """What one micro-batch on one rank contributes to the metrics; the sum of two is that of both together."""

    loss: Part  # scalars
    aux: Any  # tree of Part


PartialLoss = Callable[[Any, Any, jax.Array], tuple[jax.Array, Parts]]


def partial_loss(loss_fn: Callable[..., Any], has_aux: bool) -> PartialLoss:
    """Wraps a user's loss function for the trainer.

    Args:
        loss_fn: ``(params, batch)`` or ``(params, batch, key)``, to a scalar mean or ``Weighted``; with ``has_aux``
            to ``(loss, aux)``.
        has_aux: Whether it returns auxiliary values. Each leaf is averaged over ranks and micro-batches with the
            loss's weights; a leaf that is ``Weighted`` with its own.

    Returns:
        ``(params, batch, key) -> (total, Parts)``, to be differentiated in ``total``.
    """
    call = _with_key(loss_fn)

    def compute(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Parts]:
        result = call(params, batch, key)
        aux = None
        if has_aux:
            if not isinstance(result, tuple) or isinstance(result, Weighted) or len(result) != 2:
                raise ValueError(f"loss_fn (={_name(loss_fn)}) must return (loss, aux) when has_aux is set")
            result, aux = result
        total, loss = _as_part(loss_fn, result)

        def aux_part(leaf: Any) -> Part:
            if isinstance(leaf, Weighted):
                return Part(_wide(leaf.total), _wide(leaf.weight))
            if loss.weight is None:
                return Part(_wide(leaf), None)
            # With weight 0 a mean is often 0 / 0, and the NaN must not reach the sum.
            return Part(jnp.where(loss.weight == 0, 0, _wide(leaf) * loss.weight), loss.weight)

        return total, Parts(loss, jax.tree.map(aux_part, aux, is_leaf=lambda leaf: isinstance(leaf, Weighted)))

    return compute


def divide(parts: Parts, num_parts: int) -> tuple[jax.Array, Any]:
    """Divides summed totals by summed weights.

    Args:
        parts: The sum over ranks and micro-batches.
        num_parts: How many were summed.

    Returns:
        The loss and the aux tree; 0 where the weight is 0.
    """

    def quotient(part: Part) -> jax.Array:
        return part.total / denominator(part, num_parts)

    return quotient(parts.loss), jax.tree.map(quotient, parts.aux, is_leaf=lambda leaf: isinstance(leaf, Part))


def denominator(part: Part, num_parts: int) -> jax.Array | int:
    """The divisor of a summed part: 1 instead of a weight of 0, whose total is 0 as well."""
    return num_parts if part.weight is None else jnp.where(part.weight == 0, 1, part.weight)


def _as_part(loss_fn: Callable[..., Any], loss: Any) -> tuple[jax.Array, Part]:
    """The total to differentiate, and what is summed for the metrics."""
    values = tuple(loss) if isinstance(loss, Weighted) else (loss,)
    for value in values:
        found = jnp.shape(value) if hasattr(value, "shape") or jnp.isscalar(value) else type(value).__name__
        if found != ():
            raise ValueError(
                f"loss_fn (={_name(loss_fn)}) returned {found}: the loss must be a scalar or jaxddp.Weighted of"
                " scalars; return aux values with has_aux=True"
            )
    total = jnp.asarray(values[0])
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise ValueError(f"loss_fn (={_name(loss_fn)}) returned dtype {total.dtype}: the loss must be floating")
    return total, Part(_wide(total), _wide(loss.weight) if isinstance(loss, Weighted) else None)


def _wide(value: Any) -> jax.Array:
    """Converts to float32 or wider: 16-bit sums could overflow, and counts are exact up to 2^24."""
    return jnp.asarray(value, jnp.promote_types(jnp.result_type(value), jnp.float32))


def _with_key(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts a loss function to ``(params, batch, key)``; it gets ``key`` by position or by name if it takes one."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    if any(p.name == "key" and p.kind is p.KEYWORD_ONLY for p in parameters):
        return lambda params, batch, key: loss_fn(params, batch, key=key)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) > 2 and (positional[2].name == "key" or positional[2].default is inspect.Parameter.empty):
        return loss_fn
    return lambda params, batch, key: loss_fn(params, batch)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
