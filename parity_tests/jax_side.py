"""Training in JAX: with jaxddp's trainer, and in a plain loop on one device."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxddp
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.models.toy_test import build
from jaxddp.parity import trainings
from jaxddp.tree import like

from .cases import LEARNING_RATES, NUM_STEPS, STRATEGIES, Case, reference
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


def make_trainer(case: Case, mesh: jax.sharding.Mesh, **options: Any) -> jaxddp.Trainer:
    """The case's trainer on any mesh, with more options of the strategy."""
    loss_fn, _ = _build(case.model, seed=7)
    return jaxddp.Trainer(loss_fn, OPTIMIZERS[case.optimizer](), _strategy(case, options), mesh, **_options(case))


def _strategy(case: Case, options: dict[str, Any] | None = None) -> jaxddp.Strategy:
    strategy = STRATEGIES[case.strategy]
    return jaxddp.make_strategy(strategy.name, **strategy.jax_options, **(options or {}))


def _options(case: Case) -> dict[str, Any]:
    return {"num_microbatches": case.num_microbatches, "max_grad_norm": case.max_grad_norm, "trainable": is_trainable}


def train(case: Case, **options: Any) -> Arrays:
    """Trains on the case's ranks, with more options of the strategy; weights by torch name."""
    with jax.enable_x64(case.dtype == "float64"):
        trainer = make_trainer(case, jaxddp.data_mesh(case.num_ranks), **options)
        state = trainer.init(initial_params(case.model, case.dtype))
        for batch in batches(case.model, case.dtype):
            state, _ = trainer.step(state, batch)
        return to_numpy(trainer.params(state))


def check(cases: Sequence[Case], atol: float) -> list[tuple[Arrays, float]]:
    """Trains cases that differ in their strategy alone: weights by torch name, and how far from one device's."""
    first = cases[0]
    with jax.enable_x64(first.dtype == "float64"):
        params, task = initial_params(first.model, first.dtype), _task(first)
        expected = _on_one_device(reference(first))
        strategies = [_strategy(case) for case in cases]
        checked = []
        for result in trainings.under_strategies(task, strategies, [first.num_ranks], expected, atol):
            assert result.difference is not None
            checked.append((to_numpy(like(params, dict(result.params))), result.difference))
        return checked


# What `parity.check` does, but one device trains once for all cases that have it as their reference.


def _task(case: Case) -> trainings.Task:
    loss_fn, _ = _build(case.model, seed=7)
    params = initial_params(case.model, case.dtype)
    given = batches(case.model, case.dtype)
    return trainings.Task(loss_fn, OPTIMIZERS[case.optimizer](), params, None, given, None, _options(case))


@functools.cache
def _on_one_device(case: Case) -> Sequence[Arrays]:
    return trainings.on_one_device(_task(case))


def train_on_one_device(case: Case, num_steps: int = NUM_STEPS) -> Arrays:
    """What the case is compared with: one device, without jaxddp's step; weights by torch name."""
    with jax.enable_x64(case.dtype == "float64"):
        return to_numpy(like(initial_params(case.model, case.dtype), _on_one_device(reference(case))[num_steps - 1]))
