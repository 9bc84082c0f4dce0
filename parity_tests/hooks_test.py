"""Communication hooks: the same hook written in each package ends with the same weights."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxddp
from jaxddp.checkpoint.interop import to_numpy
from torchref.communication import hooks

from . import jax_side, torch_side
from .cases import Case
from .inputs import largest_difference

CASE = Case("bucketed(1KiB)", "sgd", 2, "toy", "float64")


def halve(buffer, axis):
    return lax.psum(buffer, axis) / 2


def fp16_of_float32(buffer, axis):
    """PyTorch rounds float64 to float32 before float16, and so one number of 20,000 to another one than JAX does."""
    return jaxddp.hooks.fp16(jax.lax.optimization_barrier(buffer.astype(jnp.float32)), axis).astype(buffer.dtype)


HOOKS = {
    "bf16": (jaxddp.hooks.bf16, hooks.bf16),
    "fp16": (fp16_of_float32, hooks.fp16),
    "halve": (halve, torch_side.halve),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_the_same_in_both_packages(ranks, name):
    in_jax, in_torch = HOOKS[name]
    ours = jax_side.train(CASE, hook=in_jax)
    assert largest_difference(ours, jax_side.train_on_one_device(CASE)) > 1e-6  # the hook changed something
    with jax.enable_x64(True):
        initial = to_numpy(jax_side.initial_params(CASE.model, CASE.dtype))
    run = partial(torch_side.train_on_rank, CASE, initial, hook=in_torch)
    for theirs in ranks.run(run, num_ranks=CASE.num_ranks):
        # float64 before a cast, and sums of two: both round alike, to the same but for a tie within 1e-16.
        assert largest_difference(ours, theirs) <= 1e-12
