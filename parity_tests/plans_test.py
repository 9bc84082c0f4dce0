"""Both packages make the same plan, and PyTorch's own rule gives PyTorch's own buckets."""

import inspect

import pytest
import torch
import torch.distributed as dist

import jaxddp.communication.buckets
import torchref.communication.buckets
import torchref.models
from torchref.strategy import tensor_spec

RULES = ("before", "torch")
CAPS = ("default", None, 0.001, 1, 10, 25, 100, 1000, [1, 25], [1, 2, 4, 8], [0.5])


def backward_specs(package, model):
    module = torchref.models.abstract(model)
    specs = [package.TensorSpec(*tensor_spec(name, p)) for name, p in module.named_parameters()]
    return specs[::-1]


@pytest.mark.parametrize("model", ["toy", "toy_tied", "toy_unused", "tiny", "byte", "seed_xl"])
def test_both_packages_plan_alike(model):
    for cap in CAPS:
        for rule in RULES:
            ours, theirs = (
                package.plan_buckets(backward_specs(package, model), cap, rule=rule)
                for package in (jaxddp.communication.buckets, torchref.communication.buckets)
            )
            assert [bucket.tensors for bucket in ours.buckets] == [bucket.tensors for bucket in theirs.buckets]
            assert [bucket.offsets for bucket in ours.buckets] == [bucket.offsets for bucket in theirs.buckets]


@pytest.mark.parametrize("caps", [[1, 25], [25], [1, 1000], [0.1, 2]])
def test_torchs_rule_is_torchs(caps):
    parameters = dict(torchref.models.abstract("seed_xl").named_parameters())
    names = list(reversed(parameters))
    tensors = [torch.empty(parameters[name].shape, device="meta") for name in names]
    limits = [int(cap * 2**20) for cap in caps]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    plan = torchref.communication.buckets.plan_buckets(
        [tensor_spec(name, parameters[name]) for name in names], caps, rule="torch"
    )
    assert [[names[i] for i in bucket] for bucket in indices] == [[t.name for t in b.tensors] for b in plan.buckets]


def test_the_planners_are_the_same_text():
    """Written twice on purpose; this keeps the two from drifting apart."""
    for name in ("plan_buckets", "plan_per_tensor", "dtype_bytes", "TensorSpec", "Bucket", "BucketPlan", "_caps_bytes"):
        ours, theirs = (
            inspect.getsource(getattr(package, name))
            for package in (jaxddp.communication.buckets, torchref.communication.buckets)
        )
        assert ours == theirs, name
