"""What only GPUs can show: NCCL under torchref, and XLA's own collectives under jaxddp. Run with ``-m gpu``.

The test process itself has simulated CPU devices, so both frameworks run in rank processes here. The programs that
JAX's runs there are compiled for one, two and eight GPUs that are not here with ``-m full``.
"""

import os

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import jaxddp
from jaxddp import targets
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.models.toy_test import abstract, build
from torchref.launch import RankPool, launch

from . import jax_side, torch_side
from .cases import STRATEGIES, Case, tolerance
from .inputs import batches, largest_difference

MODELS = ("toy_unused", "tiny")


def num_gpus() -> int:
    """All of them, up to what the batch can be split over."""
    return max(n for n in (1, 2, 3, 4, 8) if n <= max(1, torch.cuda.device_count()))


def weights_of_jaxddp(case: Case, platform: str = "cuda"):
    """Runs in a process of its own, which has not started JAX on the CPU."""
    start_jax(platform)
    return jax_side.train(case)


def planned_and_compiled(case: Case):
    start_jax("cuda")
    trainer, state, batch = larger_step(case, jaxddp.data_mesh(case.num_ranks))
    return sorted(trainer.planned(state, batch)), jaxddp.gradient_collectives(trainer.compile(state, batch))


def start_jax(platform: str) -> None:
    jax.config.update("jax_platforms", platform)
    jax.config.update("jax_default_matmul_precision", "highest")


def weights_in_many_buckets(num_ranks: int, platform: str = "cuda", model: str = "tiny"):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    start_jax(platform)
    loss_fn, params = build(model)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), jaxddp.bucketed(1 / 1024), jaxddp.data_mesh(num_ranks))
    state = trainer.init(params)
    for batch in batches(model, "float32"):
        state, _ = jax.block_until_ready(trainer.step(state, batch))
    return to_numpy(trainer.params(state))


def larger_step(case, mesh):
    loss_fn, params = abstract("lm_9m")
    strategy = STRATEGIES[case.strategy]
    chosen = jaxddp.make_strategy(strategy.name, **strategy.jax_options)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), chosen, mesh)
    tokens = jax.ShapeDtypeStruct((24, 128), jnp.int32)
    return trainer, trainer.abstract_state(params), {"tokens": tokens, "targets": tokens}


def trained_step(case, mesh):
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


@pytest.fixture(scope="module")
def jax_process():
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def nccl_ranks():
    with RankPool(num_gpus(), backend="nccl") as pool:
        yield pool


@pytest.mark.full
def test_what_gpus_run_runs_on_a_cpu(jax_process):
    case = Case("zero3(0)", "adamw", 1, "toy_unused", "float32")
    alone = torch_side.train_on_one_process(case, to_numpy(jax_side.initial_params(case.model, case.dtype)))
    for weights in (
        jax_process.run(weights_in_many_buckets, 1, "cpu", case.model)[0],
        jax_process.run(weights_of_jaxddp, case, "cpu")[0],
    ):
        assert weights.keys() == alone.keys()


@pytest.mark.gpu
def test_two_runs_on_gpus_end_with_the_same_bits():
    """With any number of collectives in flight they queue on one stream, in the order of the plan."""
    first, second = (launch(weights_in_many_buckets, num_gpus(), num_ranks=1)[0] for _ in range(2))
    assert largest_difference(first, second) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_gpus_run_what_is_planned(jax_process, strategy):
    case = Case(strategy, "adamw", num_gpus(), "tiny", "float32")
    planned, compiled = jax_process.run(planned_and_compiled, case, timeout_s=600.0)[0]
    assert planned == compiled


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_gpus_give_the_weights_of_one_cpu_process(jax_process, nccl_ranks, strategy, model):
    case = Case(strategy, "adamw", num_gpus(), model, "float32")
    start = to_numpy(jax_side.initial_params(case.model, case.dtype))
    alone = torch_side.train_on_one_process(case, start)
    ours = jax_process.run(weights_of_jaxddp, case, timeout_s=600.0)[0]
    (theirs,) = torch_side.train_all([case], start, nccl_ranks)
    atol, reason = tolerance(case)
    assert largest_difference(ours, alone) <= atol, reason
    assert largest_difference(theirs, alone) <= atol, reason
