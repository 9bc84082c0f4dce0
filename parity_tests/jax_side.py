"""Training in JAX: with jaxddp's trainer, and in a plain loop on one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxddp
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.models import build

from .cases import LEARNING_RATES, STRATEGIES, Case
from .inputs import Arrays, batches

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.03, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.01),
    "adamw_masked": lambda: optax.adamw(_learning_rate, weight_decay=0.01, mask=_decays),
}


def _learning_rate(step: jax.Array) -> jax.Array:
    return jnp.asarray(LEARNING_RATES)[step]


def _decays(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def is_trainable(name: str) -> bool:
    """Whether the torch twin of a parameter has ``requires_grad``."""
    return not name.startswith("frozen")


_build = functools.cache(build)


def initial_params(model: str, dtype: str) -> Any:
    """The weights that every run of a model starts from."""
    _, params = _build(model, seed=7)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def make_trainer(case: Case, mesh: jax.sharding.Mesh) -> jaxddp.Trainer:
    """The case's trainer on any mesh."""
    loss_fn, _ = _build(case.model, seed=7)
    strategy = STRATEGIES[case.strategy]
    return jaxddp.Trainer(
        loss_fn,
        OPTIMIZERS[case.optimizer](),
        jaxddp.make_strategy(strategy.name, **strategy.jax_options),
        mesh,
        num_microbatches=case.num_microbatches,
        trainable=is_trainable,
        max_grad_norm=case.max_grad_norm,
    )


def train(case: Case) -> Arrays:
    """Trains on the case's ranks; weights by torch name."""
    with jax.enable_x64(case.dtype == "float64"):
        trainer = make_trainer(case, jaxddp.data_mesh(case.num_ranks))
        state = trainer.init(initial_params(case.model, case.dtype))
        for batch in batches(case.model, case.dtype):
            state, _ = trainer.step(state, batch)
        return to_numpy(trainer.params(state))


@functools.cache
def train_on_one_device(model: str, optimizer: str, dtype: str, max_grad_norm: float | None) -> Arrays:
    """Trains on whole batches, without jaxddp; weights by torch name."""
    with jax.enable_x64(dtype == "float64"):
        loss_fn, _ = _build(model, seed=7)
        tx = OPTIMIZERS[optimizer]()
        if max_grad_norm is not None:
            tx = optax.chain(optax.clip_by_global_norm(max_grad_norm), tx)
        params = initial_params(model, dtype)
        frozen = {name: params.pop(name) for name in list(params) if not is_trainable(name)}

        @jax.jit
        def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
            grads = jax.grad(lambda params: loss_fn(params | frozen, batch))(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        opt_state = tx.init(params)
        for batch in batches(model, dtype):
            params, opt_state = step(params, opt_state, jax.tree.map(jnp.asarray, batch))
        return to_numpy(params | frozen)
