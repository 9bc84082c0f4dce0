"""Scaled losses: the same bits where nothing overflows; where it does, a skipped step and half the scale."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.training import loss_scale

NUM_RANKS = 4
STRATEGIES = {name: factory() for name, factory in jaxddp.STRATEGIES.items()}
STRATEGIES["zero3"] = jaxddp.zero3(min_shard_elements=0)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"].astype(params["up"].dtype) @ params["up"])
    out = (hidden @ params["down"]).astype(jnp.float32)
    return jnp.mean((out - batch["y"]) ** 2) / 128  # or 2^16 times its gradient would be above 65504


def make(strategy, loss_fn=loss_fn, optimizer=None, num_ranks=NUM_RANKS, **options):
    options = {"loss_scale": "dynamic", "nonfinite": "skip", "compute_dtype": jnp.float16, **options}
    optimizer = optax.adamw(0.1) if optimizer is None else optimizer
    return jaxddp.Trainer(loss_fn, optimizer, strategy, jaxddp.data_mesh(num_ranks), **options)


def make_params():
    rng = np.random.default_rng(0)
    return {"up": rng.normal(size=(3, 5)).astype(np.float32), "down": rng.normal(size=(5, 1)).astype(np.float32)}


def batch_of(step, bad=None):
    rng = np.random.default_rng(step)
    batch = {"x": rng.normal(size=(16, 3)).astype(np.float32), "y": rng.normal(size=(16, 1)).astype(np.float32)}
    if bad is not None:
        batch["y"][9] = bad  # of rank 2; 3e4 makes float16 gradients infinite
    return batch


@pytest.mark.parametrize(("name", "num_microbatches"), list(zip(STRATEGIES, (1, 2, 1, 2, 1, 2, 1), strict=True)))
def test_a_power_of_two_changes_no_bit(name, num_microbatches):
    options = {"compute_dtype": jnp.float32, "num_microbatches": num_microbatches, "max_grad_norm": 0.5}
    found = []
    for how in ("dynamic", None):
        trainer = make(STRATEGIES[name], loss_scale=how, **options)
        state = trainer.init(make_params())
        for step in range(3):
            state, metrics = trainer.step(state, batch_of(step))
        found.append({**trainer.params(state), "norm": metrics["grad_norm"], "loss": metrics["loss"]})
        assert metrics.get("loss_scale") == (2**16 if how else None)
    for one in found[0]:
        np.testing.assert_array_equal(found[0][one], found[1][one])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_that_overflows_on_one_rank_is_skipped_and_halves_the_scale_of_all(name):
    trainer = make(STRATEGIES[name])
    assert trainer.abstract_state(make_params()).loss_scale.scale.dtype == jnp.float32
    state, _ = trainer.step(trainer.init(make_params()), batch_of(0))
    before = [np.asarray(leaf) for leaf in trainer.params(state).values()]
    state, metrics = trainer.step(state, batch_of(1, 3e4))
    assert (int(metrics["skipped"]), float(metrics["loss_scale"])) == (1, 2**16)
    assert np.isfinite(metrics["loss"])
    for mine, other in zip(trainer.params(state).values(), before, strict=True):
        np.testing.assert_array_equal(mine, other)
    trainer.check_replicas(state)
    assert (float(state.loss_scale.scale), int(state.loss_scale.num_finite)) == (2**15, 0)
    state, metrics = trainer.step(state, batch_of(2))
    assert (int(metrics["skipped"]), float(metrics["loss_scale"])) == (0, 2**15)
    assert int(state.loss_scale.num_finite) == 1
    compiled = jaxddp.gradient_collectives(trainer.compile(state, batch_of(2)))
    assert compiled == sorted(trainer.planned(state, batch_of(2)))


def test_gradients_below_the_smallest_float16_are_kept():
    def tiny(params, batch):
        return jnp.sum(params["w"] * batch["x"][0].astype(params["w"].dtype)).astype(jnp.float32) * 1e-9

    params, batch = {"w": np.ones(8, np.float32)}, {"x": np.ones((4, 8), np.float32)}
    moved = []
    for how in ("dynamic", None):
        trainer = make(jaxddp.zero1(), tiny, optax.sgd(1e8), loss_scale=how)
        state, _ = trainer.step(trainer.init(params), batch)
        moved.append(1 - np.asarray(trainer.params(state)["w"]))
    np.testing.assert_allclose(moved[0], 0.1, rtol=1e-2)  # float16 has 10 bits, fewer below 6e-5
    np.testing.assert_array_equal(moved[1], 0)


def test_the_scale_grows_after_finite_steps_and_is_at_least_one(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 2)
    trainer = make(jaxddp.flat(), max_skips=100)
    state = trainer.init(make_params())
    scales = []
    for bad in (None, None, None, np.nan, None, None, *[np.nan] * 20):
        state, metrics = trainer.step(state, batch_of(0, bad))
        scales.append(float(metrics["loss_scale"]))
    assert scales[:7] == [2**16, 2**16, 2**17, 2**17, 2**16, 2**16, 2**17]
    assert scales[-1] == float(state.loss_scale.scale) == 1


def test_checkpoints_hold_the_scale_and_without_it_it_starts_anew(tmp_path):
    trainer = make(jaxddp.zero1())
    state, _ = trainer.step(trainer.init(make_params()), batch_of(0, 3e4))
    plain = make(jaxddp.flat(), num_ranks=2, loss_scale=None)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state)
        other, _ = checkpoints.restore(make(STRATEGIES["zero3"], num_ranks=2), make_params())
        without, _ = checkpoints.restore(plain, make_params())
        without, _ = plain.step(without, batch_of(1))
        checkpoints.save(plain, without)
        back, _ = checkpoints.restore(trainer, make_params())
    assert (float(other.loss_scale.scale), without.loss_scale) == (2**15, ())
    assert (float(back.loss_scale.scale), int(back.loss_scale.num_finite)) == (2**16, 0)
    trainer.step(back, batch_of(2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_scale": 128}, r"^loss_scale \(=128\) must be 'dynamic' or None$"),
        ({"nonfinite": "raise"}, r"^nonfinite \(='raise'\) must be 'skip' with a loss_scale"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(ValueError, match=said):
        make(jaxddp.flat(), **options)
