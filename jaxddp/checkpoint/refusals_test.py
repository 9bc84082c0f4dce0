"""Which checkpoints fit a trainer, and what those that do not are told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.checkpoint.checkpoints_test import (
    RUNS,
    advance,
    assert_close,
    dict_of,
    make,
    make_params,
    trainer_of,
    uninterrupted,
)
from jaxddp.checkpoint.files_test import refusal


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("saved")
    with jax.enable_x64(True), Checkpoints(folder) as checkpoints:
        trainer = trainer_of("zero1 on 4")
        state, position = advance(trainer, trainer.init(make_params()), 0, 2)
        checkpoints.save(trainer, state, data_position=position)
    return folder


def test_another_model_is_named_by_its_first_leaf_that_differs(saved):
    of_step_2 = f"checkpoint of step 2 in {str(saved)!r} is of another "
    params = make_params()
    wider = params | {"w": jnp.zeros((5, 9)), "stack": jnp.zeros((3, 8, 8))}
    assert refusal(saved, params=wider) == (
        of_step_2 + "model: parameter 'stack' is float64 (2, 8, 8) there and float64 (3, 8, 8) here"
    )
    assert refusal(saved, params={"new": jnp.zeros(3)} | params) == (
        of_step_2 + "model: parameter 'new' is missing there and float64 (3,) here"
    )
    del params["w"]
    assert refusal(saved, params=params) == of_step_2 + "model: parameter 'w' is float64 (5, 8) there and missing here"
    no_array = params | {"w": 1.0}
    assert (
        refusal(saved, params=no_array) == of_step_2 + "model: parameter 'w' is float64 (5, 8) there and float () here"
    )


@pytest.mark.parametrize(
    "optimizer, difference",
    [
        (optax.sgd(0.1), "'0.count' is int32 () there and missing here"),
        (optax.sgd(0.1, momentum=0.9), "'0.trace.b' is missing there and float64 (8,) here"),
        (optax.chain(optax.sgd(0.1), optax.adamw(0.1)), "'1.0.count' is missing there and int32 () here"),
    ],
)
def test_another_optimizer_is_named_by_its_first_leaf_that_differs(saved, optimizer, difference):
    trainer = make(jaxddp.bucketed(), 2, optimizer=optimizer)
    assert refusal(saved, trainer) == (
        f"checkpoint of step 2 in {str(saved)!r} is of another optimizer: optimizer state {difference}"
    )


@pytest.mark.parametrize(("strategy", "shape"), [("zero3", (8, 5)), ("zero3", (5, 9)), ("bucketed", (8, 5))])
def test_after_a_refused_restore_a_trainer_goes_on(saved, strategy, shape):
    """Shards of ``w`` and of its transpose have one shape, and are put together otherwise."""
    trainer = make(jaxddp.make_strategy(strategy, **{"zero3": {"min_shard_elements": 0}}.get(strategy, {})), 3)
    state = trainer.init(make_params())
    assert "is of another model: parameter 'w'" in refusal(saved, trainer, make_params() | {"w": jnp.zeros(shape)})
    state, _ = advance(trainer, state, 0, 2)
    assert_close(dict_of(trainer, state), uninterrupted(2))
    with Checkpoints(saved) as checkpoints:
        state, _ = checkpoints.restore(trainer, make_params())
    assert_close(dict_of(trainer, state), uninterrupted(2))


# Dtypes


def test_narrower_dtypes_are_refused_by_name(saved):
    of_step_2 = f"checkpoint of step 2 in {str(saved)!r} has "
    assert refusal(saved, RUNS["zero3 on 8"](), make_params(np.float32)) == (
        of_step_2 + "parameter 'b' in float64, of which float32 here would lose bits: restore with params of float64"
    )


def test_narrower_moments_are_refused_by_name(tmp_path):
    before, after = (
        make(jaxddp.zero1(), 2, optimizer=optax.adam(0.1, mu_dtype=dtype)) for dtype in ("float64", "float16")
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(before, before.init(make_params()))
    assert refusal(tmp_path, after) == (
        f"checkpoint of step 0 in {str(tmp_path)!r} has optimizer state '0.mu.b' in float64, of which float16 here "
        "would lose bits: restore with an optimizer of float64"
    )


def test_what_was_narrow_is_restored_in_any_wider_dtype_as_masters(tmp_path):
    halves, wide = make_params(jnp.bfloat16), make_params(np.float32)
    whole = make(jaxddp.bucketed(), 2)
    masters = make(jaxddp.zero3(min_shard_elements=0), 3, compute_dtype=jnp.bfloat16)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(whole, whole.init(halves))
        state, _ = checkpoints.restore(masters, wide)
        for name, array in masters.params(state).items():
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, halves[name].astype(np.float32))
        assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state[0].mu)} == {np.dtype("float32")}
        state, _ = advance(masters, state, 0, 1)
        checkpoints.save(masters, state)
        with pytest.raises(ValueError, match=r"in float32, of which bfloat16 .* params of float32"):
            checkpoints.restore(whole, halves)
        restored, _ = checkpoints.restore(whole, wide)
        assert_close(dict_of(whole, restored), dict_of(masters, state))
