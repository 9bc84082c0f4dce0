"""Steps whose loss or gradient is not finite: what happens to the state, on every rank."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.comparison_test import compiled_as_planned, drawn

NUM_RANKS = 4
PARAMS = drawn(0, np.float32, up=(3, 5), down=(5, 1))


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def make(strategy, **options):
    return jaxddp.Trainer(loss_fn, optax.adamw(0.1), strategy, jaxddp.data_mesh(NUM_RANKS), **options)


def batch_of(step, bad=None):
    batch = drawn(step, np.float32, x=(16, 3), y=(16, 1))
    if bad is not None:
        batch["y"][9] = bad  # of rank 2, and of its first micro-batch if there are two
    return batch


def bits(*trees):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trees)]


STRATEGIES = {
    "bucketed": (jaxddp.bucketed(), {}),
    "zero2": (jaxddp.zero2(), {"num_microbatches": 2}),
    "zero3": (jaxddp.zero3(min_shard_elements=0), {}),
    "zero1 in bfloat16": (jaxddp.zero1(), {"compute_dtype": jnp.bfloat16}),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_skipped_step_leaves_the_state_bit_for_bit(name):
    strategy, options = STRATEGIES[name]
    trainer = make(strategy, nonfinite="skip", **options)
    state = trainer.init(PARAMS)
    state, metrics = trainer.step(state, batch_of(0))
    assert int(metrics["skipped"]) == 0
    before = bits(state.params, state.opt_state)
    for bad in (np.nan, 1e30):  # which squared is infinite: the gradient is finite
        state, metrics = trainer.step(state, batch_of(1, bad))
        assert int(metrics["skipped"]) == 1
        assert bits(state.params, state.opt_state) == before
    jaxddp.check_replicas(trainer, state)
    state, metrics = trainer.step(state, batch_of(2))
    assert int(metrics["skipped"]) == 0
    assert bits(state.params) != before[: len(bits(state.params))]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.params(state)))
    compiled_as_planned(trainer, state, batch_of(0))


def test_no_policy_costs_a_collective():
    programs = []
    for policy in ("ignore", "skip"):
        trainer = make(jaxddp.zero1(), nonfinite=policy)
        text = trainer.compile(trainer.init(PARAMS), batch_of(0)).as_text()
        programs.append([text.count(kind) for kind in ("all-reduce(", "reduce-scatter(", "all-gather(")])
    assert programs[0] == programs[1]


def test_a_model_state_that_no_longer_is_finite_counts_too():
    def loss_fn(params, state, batch):
        scale = state["scale"] * batch[0, 0] / batch[0, 0]  # NaN, and nothing else is, as soon as the batch has a zero
        return jnp.mean((batch @ params["w"]) ** 2), state | {"scale": scale}

    trainer = jaxddp.Trainer(
        loss_fn, optax.sgd(0.1), jaxddp.zero1(), jaxddp.data_mesh(2), has_state=True, nonfinite="skip"
    )
    state = trainer.init({"w": jnp.ones(3)}, model_state={"scale": jnp.ones(()), "mask": -jnp.full(2, jnp.inf)})
    good, bad = np.ones((4, 3), np.float32), np.eye(4, 3, 1, dtype=np.float32)
    state, metrics = trainer.step(state, good)  # an infinity of before is no reason
    assert int(metrics["skipped"]) == 0 and set(metrics) == {"loss", "grad_norm", "skipped"}
    before = bits(state.params, state.opt_state, state.model_state)
    state, metrics = trainer.step(state, bad)
    assert int(metrics["skipped"]) == 1 and np.isfinite(metrics["loss"])
    assert bits(state.params, state.opt_state, state.model_state) == before
