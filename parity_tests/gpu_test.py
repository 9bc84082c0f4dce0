"""What only GPUs can show: NCCL under torchref, and XLA's own collectives under jaxddp. Run with ``-m gpu``.

The test process itself has simulated CPU devices, so both frameworks run in rank processes here.
"""

import pytest
import torch

import jaxddp.checkpoint.interop
from torchref.launch import launch

from . import jax_side, torch_side
from .cases import STRATEGIES, Case, tolerance
from .inputs import largest_difference

pytestmark = pytest.mark.gpu


def num_gpus() -> int:
    """All of them, up to what the batch can be split over."""
    return max(n for n in (1, 2, 3, 4, 8) if n <= max(1, torch.cuda.device_count()))


def jaxddp_on_gpus(case: Case):
    """Runs in a process of its own, which has not started JAX on the CPU."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxddp
    from jaxddp.models import build

    jax.config.update("jax_platforms", "cuda")
    jax.config.update("jax_default_matmul_precision", "highest")
    weights = jax_side.train(case)
    loss_fn, params = build("lm_9m")
    strategy = STRATEGIES[case.strategy]
    trainer = jaxddp.Trainer(
        loss_fn,
        optax.adamw(1e-3),
        jaxddp.make_strategy(strategy.name, **strategy.jax_options),
        jaxddp.data_mesh(case.num_ranks),
    )
    state, batch = trainer.init(params), {name: jnp.ones((24, 128), jnp.int32) for name in ("tokens", "targets")}
    return weights, sorted(trainer.planned(state, batch)), jaxddp.gradient_collectives(trainer.compile(state, batch))


@pytest.mark.parametrize("model", ["toy_unused", "tiny"])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_gpus_give_the_weights_of_one_cpu_process(strategy, model):
    case = Case(strategy, "adamw", num_gpus(), model, "float32")
    start = jaxddp.checkpoint.interop.to_numpy(jax_side.initial_params(case.model, case.dtype))
    alone = torch_side.train_on_one_process(case, start)
    ours, planned, compiled = launch(jaxddp_on_gpus, case, num_ranks=1)[0]
    theirs = launch(torch_side.train_on_rank, case, start, num_ranks=case.num_ranks, backend="nccl")[0]
    atol, reason = tolerance(case)
    assert largest_difference(ours, alone) <= atol, reason
    assert largest_difference(theirs, alone) <= atol, reason
    assert planned == compiled
