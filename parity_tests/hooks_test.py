"""Communication hooks: the same hook written in each package ends with the same weights."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
import torch.distributed as dist
from jax import lax

import jaxddp
import torchref
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.comparison_test import trained
from jaxddp.models.toy_test import build as build_in_jax
from torchref.communication import collectives, hooks
from torchref.interop import from_numpy
from torchref.models.toy_test import build, loss_fn
from torchref.train import local_rows

from . import jax_side
from .inputs import batches, largest_difference

NUM_RANKS, BUCKET_MB, RATE = 2, 1 / 1024, 0.1


def halve_in_jax(buffer, axis):
    return lax.psum(buffer, axis) / 2


def halve_in_torch(buffer, group):
    collectives.all_reduce(buffer, group)
    return buffer / 2


def fp16_of_float32(buffer, axis):
    """PyTorch rounds float64 to float32 before float16, and so one number of 20,000 to another one than JAX does."""
    return jaxddp.hooks.fp16(jax.lax.optimization_barrier(buffer.astype(jnp.float32)), axis).astype(buffer.dtype)


HOOKS = {
    "bf16": (jaxddp.hooks.bf16, hooks.bf16),
    "fp16": (fp16_of_float32, hooks.fp16),
    "halve": (halve_in_jax, halve_in_torch),
}


@functools.cache
def in_jax(name):
    hook = {"hook": HOOKS[name][0]} if name else {}
    with jax.enable_x64(True):
        loss, _ = build_in_jax("toy")
        strategy = jaxddp.bucketed(BUCKET_MB, **hook)
        trainer = jaxddp.Trainer(loss, optax.sgd(RATE), strategy, jaxddp.data_mesh(NUM_RANKS))
        start = trainer.init(jax_side.initial_params("toy", "float64"))
        state, _ = trained(trainer, start, batches("toy", "float64"))
        return to_numpy(trainer.params(state))


def on_rank(name, weights):
    module = from_numpy(weights, build("toy").double())
    net = torchref.BucketedDDP(module, BUCKET_MB, hook=HOOKS[name][1])
    trainer = torchref.Trainer(loss_fn, torch.optim.SGD(net.parameters(), lr=RATE, foreach=False), net)
    for batch in batches("toy", "float64"):
        tensors = {key: torch.from_numpy(array) for key, array in batch.items()}
        trainer.step(local_rows(tensors, dist.get_rank(), NUM_RANKS))
    return {key: tensor.numpy() for key, tensor in net.gather_full_params().items()}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_the_same_in_both_packages(ranks, name):
    ours = in_jax(name)
    assert largest_difference(ours, in_jax("")) > 1e-6  # the hook changed something
    with jax.enable_x64(True):
        initial = to_numpy(jax_side.initial_params("toy", "float64"))
    for theirs in ranks.run(on_rank, name, initial, num_ranks=NUM_RANKS):
        # float64 before a cast, and sums of two: both round alike, to the same but for a tie within 1e-16.
        assert largest_difference(ours, theirs) <= 1e-12
