"""Values of examples, and whether they are averaged, summed or kept: what ``eval_fn`` and ``aux`` are made of.

Each rank and micro-batch computes some of the examples. Their parts can be added up, and are divided once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .communication.reduction import wide
from .tree import path_name


class Weighted(NamedTuple):
    """A total and the weight it must be divided by, such as summed token losses and the number of tokens.

    Attributes:
        total: Sum over the examples at hand, a scalar; for ``eval_fn`` ``[examples]``.
        weight: Its weight, of the same shape; 0 if nothing counts. It must have no derivative in the parameters, which
            the sum of totals would lack: wrap what has one in ``jax.lax.stop_gradient``. A negative weight is refused
            where it is constant; of data, it makes loss and gradients of all ranks NaN.

    Example:
        >>> def loss_fn(params, batch):
        ...     error = (batch["x"] * params["w"] - batch["y"]) ** 2
        ...     return Weighted(jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"]))
    """

    total: jax.Array
    weight: jax.Array


class Mean(NamedTuple):
    """Values to be averaged over examples, such as ``Mean(guess == batch["y"])`` for the accuracy."""

    values: Any  # [examples, ...]


class Sum(NamedTuple):
    """Values to be summed over examples; integers stay integers."""

    values: Any  # [examples, ...]


class PerExample(NamedTuple):
    """Values to be kept, one for each example, in the order of all examples."""

    values: Any  # [examples, ...]


class Part(NamedTuple):
    """A summand: a total and its weight, None if all count alike."""

    total: jax.Array
    weight: jax.Array | None


class Halves(NamedTuple):
    """A sum of integers, of which 32 bits might not hold it; exact for 65,536 examples a batch."""

    high: Any  # sum of the numbers without their last 16 bits, divided by 2^16
    low: Any  # sum of these


def is_marker(leaf: Any) -> bool:
    """Whether a leaf is marked."""
    return isinstance(leaf, (Mean, Sum, PerExample))


def map_marked(function: Callable[[Any, Any], Any], tree: Any) -> Any:
    """Maps ``(path, leaf)`` of what a user's function gives; what is marked or ``Weighted`` is a leaf."""
    markers = (Weighted, Mean, Sum, PerExample)
    return jax.tree_util.tree_map_with_path(function, tree, is_leaf=lambda leaf: isinstance(leaf, markers))


def map_parts(function: Callable[..., Any], *trees: Any) -> Any:
    """Maps the contributions in trees, each a ``Part``, a ``Sum`` or a ``PerExample``."""
    return jax.tree.map(function, *trees, is_leaf=lambda leaf: isinstance(leaf, (Part, Sum, PerExample)))


def map_per_example(function: Callable[[jax.Array], jax.Array], parts: Any) -> Any:
    """Maps the values that are kept for each example; the rest of the tree stays."""
    return map_parts(lambda part: PerExample(function(part.values)) if isinstance(part, PerExample) else part, parts)


def part_of(name: str, marker: Mean | Sum | PerExample, num_examples: int, is_real: Any = None) -> Any:
    """What this rank's ``num_examples`` contribute: a ``Part`` or a ``Sum``, to be added up, or ``PerExample``.

    ``is_real``, bool[num_examples], are those that count, all if None. A ValueError names the leaf.
    """
    if getattr(marker.values, "shape", ())[:1] != (num_examples,):
        kind = f"{type(marker).__name__} of {_kind(marker.values)}"
        raise ValueError(f"{name} (={kind}) must have the {num_examples} examples at hand as dimension 0 of an array")
    values = jnp.asarray(marker.values)
    if isinstance(marker, PerExample):
        return PerExample(values)
    is_counted = is_real is not None and values.dtype.kind in "iu" and values.dtype.itemsize >= 4
    if (isinstance(marker, Mean) and not is_counted) or jnp.issubdtype(values.dtype, jnp.inexact):
        values = wide(values)
    if is_real is not None:
        values = jnp.where(is_real.reshape(-1, *[1] * (values.ndim - 1)), values, jnp.zeros_like(values))
    total: Any = values.sum(0)
    dtype = total.dtype
    if is_counted:
        total = Halves((values >> 16).sum(0), (values & 0xFFFF).sum(0))
    if isinstance(marker, Sum):
        return Sum(total)
    return Part(total, jnp.asarray(num_examples if is_real is None else is_real.sum(), dtype))


@dataclass(frozen=True)
class Measure:
    """An evaluation of examples, for use on each rank."""

    eval_fn: Callable[..., Any]  # (params, batch), or (params, model_state, batch), to a dict of markers
    has_state: bool  # whether it takes a model state

    def __call__(self, params: Any, model_state: Any, inputs: tuple[Any, jax.Array]) -> dict[str, Any]:
        """Gives the parts of the examples of ``(batch, is_real)``, as ``part_of`` does."""
        batch, is_real = inputs
        found = self.eval_fn(params, *([model_state] if self.has_state else []), batch)
        name = getattr(self.eval_fn, "__name__", repr(self.eval_fn))
        if not isinstance(found, dict) or not found:
            other = "an empty one" if isinstance(found, dict) else _kind(found)
            raise ValueError(f"eval_fn (={name}) must return a dict of jaxddp.Mean, Sum or PerExample, not {other}")

        def part(path: Any, leaf: Any) -> Any:
            where = f"eval_fn (={name}): {path_name(path)!r}"
            if isinstance(leaf, Weighted):
                return Part(*(part_of(where, Sum(wide(one)), len(is_real), is_real).values for one in leaf))
            if not is_marker(leaf):
                raise ValueError(f"{where} (={_kind(leaf)}) must be marked as jaxddp.Mean, Sum or PerExample")
            return part_of(where, leaf, len(is_real), is_real)

        return map_marked(part, found)


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"array of {[*shape]}"
