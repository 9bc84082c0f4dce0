"""Both packages plan the same communication by default, and ``rule="torch"`` gives PyTorch's own buckets."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist

import jaxddp
import jaxddp.models
import torchref
import torchref.models
from jaxddp.checkpoint.interop import torch_leaves
from jaxddp.communication.traces import plan_trace, trace_gradients
from jaxddp.comparison_test import planned_collectives as planned_in_jax
from jaxddp.models.toy_test import abstract
from jaxddp.zero.owners import LeafOwners
from torchref.communication.reduction import tensor_spec

from .inputs import batches
from .jax_side import is_trainable
from .torch_side import owners_on_rank, plans_on_rank

pytestmark = pytest.mark.smoke

NUM_RANKS = 3  # does not divide the sizes of most parameters: shards are padded
NUM_MICROBATCHES = (1, 3)
# ``byte_shallow`` has 8 MiB of parameters: enough for a second bucket after the default first one of 1 MiB.
MODELS = ("toy", "toy_tied", "toy_frozen", "toy_unused", "tiny", "byte_shallow")
# Their plans are defined alike in both packages. For ``zero3`` see the last tests.
BUCKETED = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2")
UNUSED = "unused.weight"  # in ``toy_unused``


@functools.cache
def traced(model):
    """The backward pass, which all strategies plan from, and the torch name of each parameter."""
    loss_fn, params = abstract(model)
    names = dict(zip(jaxddp.named_leaves(params), torch_leaves(params), strict=True))
    trained = {name: leaf for name, leaf in params.items() if is_trainable(name)}
    frozen = {name: leaf for name, leaf in params.items() if not is_trainable(name)}
    grad_fn = jax.grad(lambda trained, frozen, batch: loss_fn(trained | frozen, batch))
    return trace_gradients(grad_fn, trained, frozen, batches(model, "float32")[0]), names


def described(buckets, names=None):
    """Name and size of each bucket's tensors; their shapes are transposed between the packages."""
    return [[(names[t.name] if names else t.name, t.num_bytes) for t in bucket.tensors] for bucket in buckets]


def without_unused(buckets):
    kept = [[tensor for tensor in bucket if tensor[0] != UNUSED] for bucket in buckets]
    return [bucket for bucket in kept if bucket]


@pytest.mark.parametrize("model", MODELS)
def test_default_plans_are_the_same(ranks, model):
    for name in BUCKETED:
        buckets, collectives = ranks.run(plans_on_rank, name, model, NUM_MICROBATCHES, num_ranks=NUM_RANKS)[0]
        strategy = jaxddp.make_strategy(name)
        trace, names = traced(model)
        plan = plan_trace(strategy, trace)
        ours = described(plan.buckets, names)
        if model == "toy_unused":
            # jaxddp sees in the trace that the gradient of an unused parameter is zero, and does not send it. Hooks
            # cannot know, so torchref sends zeros.
            assert [names[constant] for constant in plan.constants] == [UNUSED]
            assert without_unused(buckets) == ours != buckets
            continue
        # Same tensors in the same order: jaxddp reads the order from the traced backward; torchref, which is given no
        # ``order`` here, reverses the registration.
        assert (name, buckets) == (name, ours)
        assert collectives == [
            planned_in_jax(strategy, plan, NUM_RANKS, num_microbatches=count) for count in NUM_MICROBATCHES
        ]
        if model == "byte_shallow" and name in ("bucketed", "zero1", "zero2"):
            assert len(buckets) > 1  # or the caps would not have been compared


def num_bytes(collectives, kind):
    return sum(size for its_kind, size in collectives if its_kind == kind)


def test_stage_3_sends_the_same_bytes_in_other_units(ranks):
    """A unit is a layer marked with ``jaxddp.layer``, or a module of ``shard_types``."""
    loss_fn, params = jaxddp.models.build("tiny")
    # jaxddp decides by number of elements what stays whole. This bound keeps the norms whole, as FSDP does.
    strategy = jaxddp.zero3(min_shard_elements=jaxddp.models.SIZES["tiny"].width + 1)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(2))
    tokens = np.zeros((4, 16), np.int32)
    state, batch = trainer.init(params), {"tokens": tokens, "targets": tokens}
    ours, names = trainer.planned(state, batch), traced("tiny")[1]
    buckets, (theirs,) = ranks.run(plans_on_rank, "zero3", "tiny", [1], num_ranks=2)[0]
    assert buckets == described(trainer.plan(state, batch).buckets, names)
    for kind in ("all-reduce", "reduce-scatter"):
        assert num_bytes(ours, kind) == num_bytes(theirs, kind) > 0
    # jaxddp keeps the last unit from forward to backward; FSDP gathers it again.
    head_bytes = params["head"]["kernel"].nbytes
    assert num_bytes(ours, "all-gather") + head_bytes == num_bytes(theirs, "all-gather")
    first, second = (
        inspect.signature(one).parameters["bucket_mb"].default for one in (jaxddp.zero3, torchref.FSDP.__init__)
    )
    assert first == second == "default"


@pytest.mark.parametrize("caps", [[1, 25], [25], [1, 1000], [0.1, 2]])
def test_torchs_rule_is_torchs(caps):
    with torch.device("meta"):
        parameters = dict(torchref.models.build("seed_xl").named_parameters())
    names = list(reversed(parameters))
    tensors = [torch.empty(parameters[name].shape, device="meta") for name in names]
    limits = [int(cap * 2**20) for cap in caps]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    plan = torchref.plan_buckets([tensor_spec(name, parameters[name]) for name in names], caps, rule="torch")
    assert [[names[i] for i in bucket] for bucket in indices] == [[t.name for t in b.tensors] for b in plan.buckets]


def test_whole_parameters_have_the_same_owners(ranks):
    shapes = ((8, 8), (30,), (8, 8), (5, 7), (64, 3), (1,), (0,), (8, 8), (11, 11), (30,))
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    expected = list(LeafOwners(optax.adamw(0.1), params, 3).owners.values())
    assert ranks.run(owners_on_rank, shapes, num_ranks=3) == [expected] * 3
    assert set(expected) == {0, 1, 2}
