"""What only GPUs can show: NCCL under torchref, and XLA's own collectives under jaxddp. Run with ``-m gpu``.

The test process itself has simulated CPU devices, so both frameworks run in rank processes here. The programs that
JAX's runs there are compiled for one, two and eight GPUs that are not here with ``-m full``.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import jaxddp
from jaxddp import targets
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.models import abstract, build
from torchref.launch import launch

from . import jax_side, torch_side
from .cases import STRATEGIES, Case, tolerance
from .inputs import batches, largest_difference

MODELS = ("toy_unused", "tiny")


def num_gpus() -> int:
    """All of them, up to what the batch can be split over."""
    return max(n for n in (1, 2, 3, 4, 8) if n <= max(1, torch.cuda.device_count()))


def jaxddp_on_gpus(case: Case):
    """Runs in a process of its own, which has not started JAX on the CPU."""
    jax.config.update("jax_platforms", "cuda")
    jax.config.update("jax_default_matmul_precision", "highest")
    weights = jax_side.train(case)
    trainer, state, batch = larger_step(case, jaxddp.data_mesh(case.num_ranks))
    return weights, sorted(trainer.planned(state, batch)), jaxddp.gradient_collectives(trainer.compile(state, batch))


def bucketed_on_gpus(num_ranks: int, start_early: bool, platform: str = "cuda"):
    """Weights of the tiny language model after training with many small buckets, in a process of its own."""
    jax.config.update("jax_platforms", platform)
    loss_fn, params = build("tiny")
    mesh = jaxddp.data_mesh(num_ranks)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), jaxddp.bucketed(1 / 1024), mesh, start_early=start_early)
    state = trainer.init(params)
    for batch in batches("tiny", "float32"):
        state, _ = jax.block_until_ready(trainer.step(state, batch))
    return to_numpy(trainer.params(state))


def larger_step(case, mesh):
    """A step with several buckets, in shapes alone."""
    loss_fn, params = abstract("lm_9m")
    strategy = STRATEGIES[case.strategy]
    chosen = jaxddp.make_strategy(strategy.name, **strategy.jax_options)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), chosen, mesh)
    tokens = jax.ShapeDtypeStruct((24, 128), jnp.int32)
    return trainer, trainer.abstract_state(params), {"tokens": tokens, "targets": tokens}


def trained_step(case, mesh):
    """The step that ``jax_side.train`` takes, in shapes alone."""
    trainer = jax_side.make_trainer(case, mesh)
    params, batch = jax_side.initial_params(case.model, case.dtype), batches(case.model, case.dtype)[0]
    state, batch = jax.eval_shape(lambda: (params, jax.tree.map(jnp.asarray, batch)))
    return trainer, trainer.abstract_state(state), batch


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_what_gpus_run_compiles_for_them_as_planned(strategy, num_ranks):
    cases = [Case(strategy, "adamw", num_ranks, model, "float32") for model in MODELS]
    mesh = targets.mesh(f"h100:{num_ranks}")
    steps = [larger_step(cases[0], mesh), *(trained_step(case, mesh) for case in cases)]
    pending = [targets.start_compile(*step) for step in steps]
    for (trainer, state, batch), one in zip(steps, pending, strict=True):
        assert jaxddp.gradient_collectives(one.result()) == sorted(trainer.planned(state, batch))
        assert bool(trainer.planned(state, batch)) == (num_ranks > 1)


@pytest.mark.parametrize(("found", "used"), [(0, 1), (1, 1), (2, 2), (5, 4), (8, 8), (16, 8)])
def test_as_many_gpus_are_used_as_share_the_batch(found, used, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    assert num_gpus() == used


@pytest.mark.gpu
@pytest.mark.parametrize("start_early", [True, False])
def test_two_runs_on_gpus_end_with_the_same_bits(start_early):
    """With any number of collectives in flight they queue on one stream, in the order of the plan."""
    first, second = (launch(bucketed_on_gpus, num_gpus(), start_early, num_ranks=1)[0] for _ in range(2))
    assert largest_difference(first, second) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_gpus_give_the_weights_of_one_cpu_process(strategy, model):
    case = Case(strategy, "adamw", num_gpus(), model, "float32")
    start = to_numpy(jax_side.initial_params(case.model, case.dtype))
    alone = torch_side.train_on_one_process(case, start)
    ours, planned, compiled = launch(jaxddp_on_gpus, case, num_ranks=1)[0]
    theirs = launch(torch_side.train_on_rank, case, start, num_ranks=case.num_ranks, backend="nccl")[0]
    atol, reason = tolerance(case)
    assert largest_difference(ours, alone) <= atol, reason
    assert largest_difference(theirs, alone) <= atol, reason
    assert planned == compiled
