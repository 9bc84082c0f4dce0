"""Whole parameters with owners: parity of optimizers that are not element-wise, what ranks hold, what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxddp
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.comparison_test import (
    NUM_EMPTY,
    assert_near,
    compiled_as_planned,
    mostly_full,
    on_one_device,
    refusal,
    trained,
)
from jaxddp.instruments.inspect import held_bytes, step_memory
from jaxddp.models import build
from jaxddp.strategy import without_communication
from jaxddp.tree import named_leaves
from jaxddp.zero.owners import LeafOwners

pytestmark = pytest.mark.usefixtures("x64")
OPTIMIZERS = {
    "muon": lambda: contrib.muon(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.inject_hyperparams(optax.lamb)(optax.linear_schedule(1e-2, 0.0, 9)),
    "blocks": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1, momentum=0.9)),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, 1), optax.sgd(0.1)),
    "masked": lambda: optax.masked(optax.lamb(1e-2), {"a": True, "b": False, "c": True, "empty": False}),
    "several": lambda: optax.multi_transform(
        {"muon": contrib.muon(1e-2), "sgd": optax.sgd(0.1, momentum=0.9), "none": optax.set_to_zero()},
        {"a": {"kernel": "muon", "bias": "sgd"}, "b": "muon", "c": "none", "empty": "sgd"},
    ),
    "every second": lambda: optax.MultiSteps(optax.lamb(1e-2), 2),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adam(1e-2)),
    "plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1)),
}
QUICK = (("muon", 3), ("adafactor", 4))


def loss_fn(params, batch):
    x = jnp.tanh(batch["x"] @ params["a"]["kernel"] + params["a"]["bias"])
    return jnp.mean((jnp.tanh(x @ params["b"]) @ params["c"] - batch["y"]) ** 2)


def inputs(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"a": {"kernel": (6, 8), "bias": (8,)}, "b": (8, 8), "c": (8, 3), "empty": (NUM_EMPTY,)}
    params = jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(dtype), shapes, is_leaf=lambda s: type(s) is tuple
    )
    return params, {"x": rng.normal(size=(24, 6)).astype(dtype), "y": rng.normal(size=(24, 3)).astype(dtype)}


def trainer_of(strategy, num_ranks=4, optimizer=None, **options):
    return jaxddp.Trainer(loss_fn, optimizer or contrib.muon(1e-2), strategy, jaxddp.data_mesh(num_ranks), **options)


@pytest.mark.parametrize(("name", "num_ranks"), mostly_full(QUICK, itertools.product(OPTIMIZERS, (3, 4))))
def test_weights_are_those_of_one_process(name, num_ranks):
    params, batch = inputs()
    clipped = optax.chain(optax.clip_by_global_norm(0.1), OPTIMIZERS[name]())
    expected = on_one_device(loss_fn, params, [batch] * 5, clipped)
    strategy = {3: jaxddp.zero1(0.0005, shard="leaves"), 4: jaxddp.zero2(shard="leaves")}[num_ranks]
    trainer = trainer_of(strategy, num_ranks, OPTIMIZERS[name](), num_microbatches=num_ranks - 2, max_grad_norm=0.1)
    state = trainer.init(params)
    compiled = compiled_as_planned(trainer, state, batch)
    assert [kind for kind, _ in compiled].count("all-to-all") == 2
    state, _ = trained(trainer, state, [batch] * 5)
    assert_near(trainer.params(state), expected)
    jaxddp.check_replicas(trainer, state)


def test_a_checkpoint_moves_between_ranks_and_strategies(tmp_path):
    params, batch = inputs()
    adam = optax.chain(optax.add_noise(0.01, 0.5, 1), optax.adam(1e-2))  # with a key and a count
    expected = on_one_device(loss_fn, params, [batch] * 3, adam)
    strategies = [(jaxddp.naive(), 2), (jaxddp.zero1(shard="leaves"), 4), (jaxddp.zero2(shard="leaves"), 3)]
    for step, (strategy, num_ranks) in enumerate(strategies):
        trainer = trainer_of(strategy, num_ranks, adam)
        with Checkpoints(tmp_path) as checkpoints:
            state = checkpoints.restore(trainer, params)[0] if step else trainer.init(params)
            state, _ = trainer.step(state, batch)
            checkpoints.save(trainer, state)
    assert_near(trainer.params(state), expected)
    with Checkpoints(tmp_path) as checkpoints:
        assert "must be element-wise" in refusal(checkpoints.restore, trainer_of(jaxddp.zero1(), 2, adam), params)


def test_masters_in_a_compute_dtype_have_owners_too():
    params, batch = inputs(np.float32)
    options = {"compute_dtype": jnp.bfloat16, "max_grad_norm": 0.1, "nonfinite": "skip"}
    trainer = trainer_of(jaxddp.zero1(shard="leaves"), **options)
    alone = trainer_of(jaxddp.naive(), **options)
    states = [one.init(params) for one in (trainer, alone)]
    program = trainer.compile(states[0], batch)
    compiled = compiled_as_planned(trainer, states[0], batch)
    assert [kind for kind, _ in compiled].count("all-to-all") == 3
    for number in range(3):
        given = batch if number else {**batch, "x": np.full_like(batch["x"], np.nan)}
        states = [one.step(state, given)[0] for one, state in zip((trainer, alone), states, strict=True)]
    assert_near(trainer.params(states[0]), alone.params(states[1]), atol=2e-3)  # gradients are summed in another order
    held = held_bytes(trainer.layout(states[0]))
    assert step_memory(program, trainer.abstract_state(params)).optimizer_state == held.optimizer_state


@pytest.mark.parametrize("sends", [True, False])
def test_frozen_parameters_have_no_owner(sends):
    params, batch = inputs()
    strategy = jaxddp.zero1(shard="leaves")
    strategy = strategy if sends else without_communication(strategy)
    trainer = trainer_of(strategy, 2, optax.lamb(1e-2), trainable=lambda name: name != "b")
    state = trainer.init(params)
    assert trainer.layout(state).owners.owners.keys() == {"a.bias", "a.kernel", "c", "empty"}
    assert bool(compiled_as_planned(trainer, state, batch)) == sends
    state, metrics = trainer.step(state, batch)
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(trainer.params(state)["b"], params["b"])


@pytest.mark.parametrize("make", [optax.adamw, contrib.muon, optax.sgd], ids=lambda make: make.__name__)
def test_state_is_shared_out_evenly(make):
    params = jax.eval_shape(lambda: build("byte")[1])
    leaves, held = LeafOwners(make(1e-3), params, 4), [0] * 4
    for name, slot in named_leaves(leaves.slots).items():
        if (param := leaves.param_of[name]) is not None:
            held[leaves.owners[param]] += slot.size * slot.dtype.itemsize
    assert max(held) <= 1.1 * sum(held) / 4
    assert sum(leaves.widths.values()) * 4 == max(held)  # of float32
    assert set(leaves.owners.values()) == set(range(4))  # without any state, parameters are shared out


COUPLED = {
    "clipping": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), "depends on 'a.kernel'"),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(0.1), 3), "depends on 'a.kernel'"),
    "prodigy": (contrib.prodigy(), "depends on"),
    "a neighbour": (
        optax.stateless(lambda updates, params: {**updates, "c": updates["c"] + params["b"][:, :3]}),
        "param 'c' depends on 'b'",
    ),
    "a loop over all": (
        optax.stateless(
            lambda updates, params: jax.lax.fori_loop(
                0, 2, lambda step, given: {**given, "c": given["c"] + given["b"][:, :3]}, updates
            )
        ),
        "param 'c' depends on 'a.bias'",  # a loop is one operation
    ),
}


@pytest.mark.parametrize(("optimizer", "found"), COUPLED.values(), ids=COUPLED)
def test_an_update_that_depends_on_another_parameter_is_refused(optimizer, found):
    for num_ranks in (1, 4):
        line = refusal(trainer_of(jaxddp.zero1(shard="leaves"), num_ranks, optimizer).abstract_state, inputs()[0])
        assert line.startswith("optimizer must update each parameter by itself") and found in line


def test_a_state_that_changes_its_dtype_is_refused():
    def changes(updates, state, params=None):
        return updates, jax.tree.map(lambda m, g: m.astype(jnp.float32) + g.astype(jnp.float32), state, updates)

    widening = optax.GradientTransformation(lambda params: optax.tree.zeros_like(params, dtype=jnp.bfloat16), changes)
    assert "must keep one structure, and state its dtypes" in refusal(LeafOwners, widening, inputs()[0], 2)


def test_states_of_pythons_numbers_and_rates_of_another_dtype_are_taken():
    def update(updates, state, params=None):
        mean = jax.tree.map(lambda old, new: jnp.where(state["is_first"], new, (old + new) / 2), state["mean"], updates)
        return mean, {"is_first": False, "mean": mean}

    starts = optax.GradientTransformation(
        lambda params: {"is_first": True, "mean": optax.tree.zeros_like(params)}, update
    )
    optimizer, (params, batch) = optax.chain(starts, optax.inject_hyperparams(optax.sgd)(0.1)), inputs(np.float32)
    found = []
    for strategy in (jaxddp.naive(), jaxddp.zero1(shard="leaves")):
        trainer = trainer_of(strategy, optimizer=optimizer)
        state = trainer.init(params)
        for rate in (1, 0.5):  # an integer, and a float64
            getattr(state.opt_state, "shared", state.opt_state)[1].hyperparams["learning_rate"] = rate
            state, _ = trainer.step(state, batch)
        found.append(trainer.params(state))
    assert_near(*found, atol=1e-6)  # in float32, of a few steps of size 1
