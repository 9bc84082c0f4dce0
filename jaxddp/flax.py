"""Flax models as loss functions for a trainer: their parameters, their state, and keys that differ by rank and step.

    loss_fn, params, model_state = jaxddp.flax.from_nnx(model, loss)
    trainer = jaxddp.Trainer(loss_fn, optimizer, strategy, mesh, has_state=True)
    state = trainer.init(params, model_state=model_state)

``Trainer.evaluate`` gives no key: then the model is in evaluation mode, with its running statistics and no dropout.
"""

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core import unfreeze
from flax.core.meta import unbox


def from_nnx(model: nnx.Module, loss: Callable[[Any, Any], Any], *, has_aux: bool = False) -> tuple[Any, Any, Any]:
    """Takes an NNX model apart.

    Args:
        model: It stays as it is, and trains in evaluation mode if it is in it;
            ``nnx.update(model, trainer.params(state), trainer.model_state(state))`` writes back what was trained.
        loss: ``(model, batch)`` to what a trainer's loss gives. It may change the model's state, as BatchNorm does;
            what it writes into an ``nnx.Param``, as ``nnx.WeightNorm`` does, is lost.
        has_aux: As of the trainer.

    Returns:
        ``(loss_fn, params, model_state)``; the model state is all but parameters and random streams.
    """
    # A model that is trained later changes its variables in place. The types of split know three parts at most.
    parts: Any = nnx.split(nnx.clone(model), nnx.Param, nnx.RngState, ...)
    graph, params, streams, model_state = parts
    names = sorted({node.tag for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngStream)})

    def loss_fn(params: Any, model_state: Any, batch: Any = None, key: jax.Array | None = None) -> Any:
        if not isinstance(model_state, nnx.State):  # a batch, without has_state
            kind = type(model_state).__name__
            raise ValueError(f"model_state (={kind}) must be that of from_nnx: give the trainer has_state=True")
        # Without a copy it would share its random streams with the model, which JAX refuses to change in a trace.
        merged = nnx.merge(graph, params, streams, model_state, copy=True)
        if key is None:
            merged.eval()
        else:
            keys: Any = _keys(key, names)
            nnx.reseed(merged, policy="match_shape", **keys)  # a stack of layers has one a layer
        result = loss(merged, batch)
        new_state = nnx.state(merged, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
        return (result[0], (new_state, result[1])) if has_aux else (result, new_state)

    return loss_fn, params, model_state


def from_linen(
    module: Any, variables: Any, loss: Callable[..., Any], *, rngs: Sequence[str] = ("dropout",), has_aux: bool = False
) -> tuple[Any, Any, Any]:
    """Makes a loss function of a Linen module.

    Args:
        module: A ``flax.linen.Module``.
        variables: From ``module.init``, by collection.
        loss: ``(apply, batch, is_training)`` to what a trainer's loss gives. ``apply`` takes the module's arguments;
            give it those that tell training from evaluation, such as ``deterministic=not is_training``.
        rngs: The module's random streams in training.
        has_aux: As of the trainer.

    Returns:
        ``(loss_fn, params, model_state)``; the model state is all collections but ``params``.
    """
    # Of a FrozenDict too: modules return dictionaries. What names mesh axes would ask for them in each call.
    variables = unbox(unfreeze(dict(variables)))
    others = {name: collection for name, collection in variables.items() if name != "params"}

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array | None = None) -> Any:
        held, calls = dict(model_state), itertools.count()

        def apply(*args: Any, **kwargs: Any) -> Any:
            if key is None:
                return module.apply({"params": params, **held}, *args, **kwargs)
            keys = _keys(jax.random.fold_in(key, next(calls)), rngs)  # each call draws masks of its own
            outputs, new = module.apply({"params": params, **held}, *args, rngs=keys, mutable=list(held), **kwargs)
            held.update(new)
            return outputs

        result = loss(apply, batch, key is not None)
        return (result[0], (held, result[1])) if has_aux else (result, held)

    return loss_fn, variables["params"], others


def _keys(key: jax.Array, names: Sequence[str]) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in names}
