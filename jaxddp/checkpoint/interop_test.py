"""Layers and bits are compared with torch's own in ``parity_tests/interop_test.py``."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxddp.checkpoint.interop import from_numpy, to_numpy
from jaxddp.comparison_test import refusal


def test_nothing_is_shared_with_the_arrays_given_or_returned():
    params = {"own": jnp.zeros(64)}
    arrays = to_numpy(params)
    assert arrays["own"].flags.c_contiguous
    arrays["own"][:] = 1.0
    assert not params["own"].any()
    # jax.device_put takes over NumPy's memory where it starts at a multiple of 64 bytes: the hardest case.
    memory = np.zeros(64 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    aligned = memory[start : start + 64]
    back = from_numpy({"own": aligned}, params)
    aligned[:] = 1.0
    assert not back["own"].any()


def test_nnx_state_comes_back_as_nnx_state():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    arrays = to_numpy(state)
    assert {name: array.shape for name, array in arrays.items()} == {"weight": (3, 2), "bias": (3,)}
    back = from_numpy({name: array + 1 for name, array in arrays.items()}, state)
    assert isinstance(back, nnx.State) and isinstance(back["kernel"], nnx.Param)
    assert np.array_equal(back["kernel"][...], np.asarray(state["kernel"][...]) + 1)


def test_float64_is_kept_and_never_narrowed_silently():
    like = {"own": jax.ShapeDtypeStruct((3,), np.float64)}
    arrays = {"own": np.full(3, 1 / 3)}
    with jax.enable_x64(True):
        assert np.array_equal(np.asarray(from_numpy(arrays, like)["own"]), arrays["own"])
    assert "'own' is float64 (3,), not float32 (3,)" in refusal(from_numpy, arrays, like)


def test_every_array_that_does_not_fit_is_named_in_one_line():
    like = {"a": {"kernel": jnp.zeros((2, 3))}, "b": {"kernel": jnp.zeros((2, 3))}, "c": jnp.zeros(2)}
    arrays = {"a.weight": np.zeros((2, 3), np.float32), "c": np.zeros(2), "d": np.zeros(1), "e": np.zeros(1)}
    assert refusal(from_numpy, arrays, like) == (
        "arrays must have the names, shapes and dtypes of like: 'a.weight' is float32 (2, 3), not float32 (3, 2); "
        "'b.weight' is missing, not float32 (3, 2); 'c' is float64 (2,), not float32 (2,); "
        "'d' is float64 (1,), not wanted; 'e' is float64 (1,), not wanted"
    )


def test_trees_without_a_rule_are_refused():
    for params, fault in (
        ({"a": {"kernel": np.zeros((2, 2)), "weight": np.zeros((2, 2))}}, "'a.weight' and another leaf have the name"),
        ({"a.b": np.zeros(2), "a": {"b": np.zeros(2)}}, "two leaves have the name 'a.b'"),
    ):
        for found in (refusal(to_numpy, params), refusal(from_numpy, {}, params)):
            assert fault in found
