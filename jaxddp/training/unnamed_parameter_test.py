"""Parameters whose name is "": one array, or the key "" of a dictionary. Their optimizer state is sharded as any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxddp
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.comparison_test import assert_near, trained
from jaxddp.training.ema_test import adam_with_average, averages_on_one_device

pytestmark = pytest.mark.usefixtures("x64")
STRATEGIES = {
    "zero1": jaxddp.zero1(),
    "zero1 by leaves": jaxddp.zero1(shard="leaves"),
    "zero2": jaxddp.zero2(),
    "zero3": jaxddp.zero3(min_shard_elements=0),
}


def loss_fn(params, batch):
    (w,) = jax.tree.leaves(params)
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize(("is_array", "compute_dtype"), [(True, None), (False, None), (True, "float64")])
def test_a_checkpoint_holds_the_moments_and_averages_of_all_ranks(strategy, is_array, compute_dtype, tmp_path):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 2))
    params = w if is_array else {"": w}
    batches = [{"x": rng.normal(size=(12, 4)), "y": rng.normal(size=(12, 2))} for _ in range(6)]
    saves, goes_on = (
        jaxddp.Trainer(loss_fn, adam_with_average(0.5), *on_ranks, compute_dtype=compute_dtype)
        for on_ranks in ((strategy, jaxddp.data_mesh(4)), (jaxddp.naive(), jaxddp.data_mesh(2)))
    )
    state, _ = trained(saves, saves.init(params), batches[:3])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saves, state)
        alone = checkpoints.restore_params(params)
        restored, _ = checkpoints.restore(goes_on, params)
    assert_near(alone, goes_on.params(restored), atol=0)
    after, averages = averages_on_one_device(loss_fn, params, batches, 0.5)
    state, _ = trained(goes_on, restored, batches[3:])
    assert_near(goes_on.params(state), after)
    assert_near(goes_on.params(goes_on.averaged(state)), averages)
