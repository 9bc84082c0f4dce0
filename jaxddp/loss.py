"""What a loss function or an ``eval_fn`` returns, as parts that can be summed over ranks and micro-batches.

Each rank and micro-batch sees part of the batch, and sums of parts can be added, means cannot. So the division happens
once, after totals and weights have been summed; a plain mean has no weight, and is divided by the number of its parts:

    loss = sum(total) / sum(weight)        gradient = sum(d total / d params) / sum(weight)
"""

import functools
import inspect
from collections.abc import Callable
from numbers import Number
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .communication.reduction import wide
from .tree import path_name


class Weighted(NamedTuple):
    """A total and the weight it must be divided by, such as summed token losses and the number of tokens.

    Attributes:
        total: Sum over the examples at hand, a scalar; for ``eval_fn`` ``[examples]``.
        weight: Its weight, of the same shape; 0 if nothing counts. It must have no derivative in the parameters: wrap
            what has one in ``jax.lax.stop_gradient``. A negative or infinite one makes loss and gradients NaN.
    """

    total: jax.Array
    weight: jax.Array


class Mean(NamedTuple):
    """Values to be averaged over examples, such as ``Mean(guess == batch["y"])`` for the accuracy."""

    values: Any  # [examples, ...]


class Sum(NamedTuple):
    """Values to be summed over examples; integers stay integers, of 32 bits within a batch."""

    values: Any  # [examples, ...]


class PerExample(NamedTuple):
    """Values to be kept, one for each example, in the order of all examples."""

    values: Any  # [examples, ...]


class Part(NamedTuple):
    """A summand: a total and its weight, None if all count alike."""

    total: jax.Array
    weight: jax.Array | None


MARKERS = (Mean, Sum, PerExample)


def map_marked(function: Callable[[Any, Any], Any], tree: Any) -> Any:
    """Maps ``(path, leaf)`` of what a user's function gives; what is marked or ``Weighted`` is a leaf."""
    return jax.tree_util.tree_map_with_path(function, tree, is_leaf=lambda leaf: isinstance(leaf, (Weighted, *MARKERS)))


def map_parts(function: Callable[..., Any], *trees: Any) -> Any:
    """Maps the contributions in trees, each a ``Part``, a ``Sum`` or a ``PerExample``."""
    return jax.tree.map(function, *trees, is_leaf=lambda leaf: isinstance(leaf, (Part, Sum, PerExample)))


def map_per_example(function: Callable[[jax.Array], jax.Array], parts: Any) -> Any:
    """Maps the values that are kept for each example; the rest of the tree stays."""
    return map_parts(lambda part: PerExample(function(part.values)) if isinstance(part, PerExample) else part, parts)


def part_of(name: str, marker: Mean | Sum | PerExample, num_examples: int, is_real: Any = None) -> Any:
    """What this rank's ``num_examples`` contribute, or those that count, by ``is_real``, bool[num_examples]."""
    values = jnp.asarray(marker.values)
    if values.shape[:1] != (num_examples,):
        kind = f"{type(marker).__name__} of {[*values.shape]}"
        raise ValueError(f"{name} (={kind}) must have the {num_examples} examples at hand as dimension 0")
    if isinstance(marker, PerExample):
        return PerExample(values)
    if isinstance(marker, Mean) or jnp.issubdtype(values.dtype, jnp.inexact):
        values = wide(values)
    if is_real is not None:
        values = jnp.where(is_real.reshape(-1, *[1] * (values.ndim - 1)), values, jnp.zeros_like(values))
    total = values.sum(0)
    if isinstance(marker, Sum):
        return Sum(total)
    return Part(total, jnp.asarray(num_examples if is_real is None else is_real.sum(), total.dtype))


def measured(
    eval_fn: Callable[..., Any], has_state: bool, params: Any, model_state: Any, inputs: tuple[Any, jax.Array]
) -> dict[str, Any]:
    """The parts that a user's ``eval_fn`` gives of a rank's examples, ``(batch, is_real)``, as ``part_of`` does."""
    batch, is_real = inputs
    found = eval_fn(params, *([model_state] if has_state else []), batch)
    if not isinstance(found, dict) or not found:
        raise ValueError(f"eval_fn (={_name(eval_fn)}) must return a dict of jaxddp.Mean, Sum or PerExample")

    def part(path: Any, leaf: Any) -> Any:
        where = f"eval_fn (={_name(eval_fn)}): {path_name(path)!r}"
        if isinstance(leaf, Weighted):
            parts = wide(leaf.total), _finite(wide(leaf.weight))
            return Part(*(part_of(where, Sum(one), len(is_real), is_real).values for one in parts))
        if not isinstance(leaf, MARKERS):
            raise ValueError(f"{where} must be marked as jaxddp.Mean, Sum or PerExample")
        return part_of(where, leaf, len(is_real), is_real)

    return map_marked(part, found)


class Parts(NamedTuple):
    """What one micro-batch on one rank contributes to the metrics; the sum of two is that of both together."""

    loss: Part  # scalars
    aux: Any  # tree of Part, Sum and PerExample


# ``(params, model_state, batch, key) -> (total, (Parts, next model_state))``, to be differentiated in ``total``.
PartialLoss = Callable[[Any, Any, Any, jax.Array | None], tuple[jax.Array, tuple[Parts, Any]]]


def partial_loss(loss_fn: Callable[..., Any], has_aux: bool, has_state: bool = False) -> PartialLoss:
    """Wraps a user's loss function, as ``Trainer`` takes it; the model state is ``()`` without ``has_state``."""
    call = with_key(loss_fn, has_state)
    expected = "(loss, (new_state, aux))" if has_state and has_aux else f"(loss, {'new_state' if has_state else 'aux'})"

    def pair(result: Any) -> Any:
        if not isinstance(result, tuple) or isinstance(result, Weighted) or len(result) != 2:
            raise ValueError(f"loss_fn (={_name(loss_fn)}) must return {expected}")
        return result

    def compute(
        params: Any, model_state: Any, batch: Any, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[Parts, Any]]:
        new_state: Any = ()
        aux: Any = None
        result = call(params, *([model_state] if has_state else []), batch, key=key)
        if has_state or has_aux:
            result, aux = pair(result)
        if has_state:
            new_state, aux = pair(aux) if has_aux else (aux, None)
            new_state = _like(new_state, model_state)
        total, loss = _as_part(loss_fn, result)
        if not has_aux:
            return total, (Parts(loss, None), new_state)

        def aux_part(path: Any, leaf: Any) -> Any:
            if isinstance(leaf, MARKERS):
                return part_of(f"aux leaf {path_name(path)!r}", leaf, len(jax.tree.leaves(batch)[0]))
            if isinstance(leaf, Weighted):
                return Part(wide(leaf.total), _finite(wide(leaf.weight)))
            shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
            if shape or jnp.issubdtype(dtype, jnp.integer):  # must not be averaged over ranks
                found = f"aux leaf {path_name(path)!r} (={[*shape] if shape else dtype})"
                raise ValueError(f"{found} must be marked: as jaxddp.Mean, Sum, PerExample or Weighted")
            if loss.weight is None:
                return Part(wide(leaf), None)
            # With weight 0 a mean is often 0 / 0, and the NaN must not reach the sum.
            return Part(jnp.where(loss.weight == 0, 0, wide(leaf) * loss.weight), loss.weight)

        return total, (Parts(loss, map_marked(aux_part, aux)), new_state)

    return compute


def divide(parts: Parts, num_parts: int) -> tuple[jax.Array, Any]:
    """The loss and the aux tree, of the sum of ``num_parts`` parts; 0 where the weight is 0."""
    loss = parts.loss.total / denominator(parts.loss, num_parts)
    if parts.aux is None:
        return loss, None
    # What is no Part has been summed or joined, and is not divided.
    return loss, map_parts(
        lambda part: part.total / denominator(part, num_parts) if isinstance(part, Part) else part.values, parts.aux
    )


def denominator(part: Part, num_parts: int) -> jax.Array | int:
    """The divisor of a summed part: 1 instead of a weight of 0, whose total is 0 as well."""
    return num_parts if part.weight is None else jnp.where(part.weight == 0, 1, part.weight)


def _as_part(loss_fn: Callable[..., Any], loss: Any) -> tuple[jax.Array, Part]:
    """The total to differentiate, and what is summed for the metrics."""
    values = tuple(loss) if isinstance(loss, Weighted) else (loss,)
    for value in values:
        found = () if isinstance(value, Number) else getattr(value, "shape", type(value).__name__)
        if found != ():
            said = f"loss_fn (={_name(loss_fn)}) returned {found}"
            raise ValueError(f"{said}: the loss must be a scalar or jaxddp.Weighted of scalars; aux needs has_aux=True")
    total = jnp.asarray(values[0])
    if not isinstance(loss, Weighted):
        return total, Part(wide(total), None)
    error = "the weight of jaxddp.Weighted must not depend on the parameters: wrap it in jax.lax.stop_gradient"
    return total, Part(wide(total), _finite(refuse_derivative(wide(loss.weight), error)))


def _finite(weight: jax.Array) -> jax.Array:
    """NaN in place of a negative weight, which would turn the update around, or an infinite one, which would end it."""
    return jnp.where((weight >= 0) & (weight < jnp.inf), weight, jnp.nan)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def refuse_derivative(value: jax.Array, error: str) -> jax.Array:
    """Returns ``value``; raises ValueError with the message ``error`` where it is differentiated."""
    return value


@functools.partial(refuse_derivative.defjvp, symbolic_zeros=True)
def _check_derivative(error: str, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    if not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
        raise ValueError(error)
    return primals[0], jnp.zeros_like(primals[0])


def _like(new_state: Any, model_state: Any) -> Any:
    """Refuses a model state of other names, shapes or dtypes than the one before it."""
    structures: Any = [jax.tree.structure(tree) for tree in (new_state, model_state)]
    if structures[0] != structures[1]:
        raise ValueError(f"new_state (={structures[0]}) must be as model_state (={structures[1]})")

    def checked(path: Any, new: Any, old: Any) -> jax.Array:
        was, now = (f"{jnp.result_type(leaf)}{[*jnp.shape(leaf)]}" for leaf in (old, new))
        if was != now:
            raise ValueError(f"new_state leaf {path_name(path)!r} (={now}) must be as in model_state (={was})")
        return jax.lax.convert_element_type(new, old.dtype)  # a number of Python's has a weak one, which loops refuse

    return jax.tree.map_with_path(checked, new_state, model_state)


def with_key(loss_fn: Callable[..., Any], has_state: bool) -> Callable[..., Any]:
    """Adapts a loss function to ``(*inputs, key=key)``; it gets a key if it has a parameter ``key``.

    A key that ``functools.partial`` has set stays. None, to evaluate, is not passed on: the default counts. A loss with
    a model state must take one: its BatchNorm would normalise by the examples that a rank evaluates.
    """
    parameter = None if "key" in _bound_names(loss_fn) else inspect.signature(loss_fn).parameters.get("key")

    def call(*inputs: Any, key: Any) -> Any:
        if parameter is not None and key is not None:
            return loss_fn(*inputs, key=key)
        if key is None and (has_state if parameter is None else parameter.default is parameter.empty):
            raise ValueError(
                f"evaluate tells loss_fn (={_name(loss_fn)}) by key=None that it does not train: give it a parameter"
                " key=None, and where it is None no dropout, and the running statistics of a model state"
            )
        return loss_fn(*inputs)

    return call


def _bound_names(function: Any) -> set[str]:
    """Arguments that ``functools.partial`` has set, also inside of ``jax.jit``, ``jax.checkpoint`` and decorators."""
    names: set[str] = set()
    while (is_partial := isinstance(function, functools.partial)) or hasattr(function, "__wrapped__"):
        names |= set(function.keywords if is_partial else ())
        function = function.func if is_partial else function.__wrapped__
    return names


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
