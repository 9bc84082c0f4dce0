import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp.communication.buckets import TensorSpec, plan_all_reduces, plan_buckets, plan_per_tensor
from jaxddp.communication.reduction import pack, unpack
from jaxddp.comparison_test import refusal
from jaxddp.models import abstract
from jaxddp.tree import tensor_specs


def names(plan):
    return [[tensor.name for tensor in bucket.tensors] for bucket in plan.buckets]


def test_buckets_close_before_their_caps_or_with_torchs_rule_after_them():
    tensors = [TensorSpec(name, (2**18,), "float32") for name in "abcdefgh"]  # 1 MiB each
    assert names(plan_buckets(tensors, [1, 2, 3])) == [["a"], ["b", "c"], ["d", "e", "f"], ["g", "h"]]
    assert names(plan_buckets(tensors, 1.5, rule="torch")) == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
    assert names(plan_buckets(tensors, "default")) == [["a"], list("bcdefgh")]


def test_counts_of_the_171m_model():
    """The order of the traced backward gives the counts that reversed registration gives by hand; caps in MiB."""
    loss_fn, params = abstract("seed_xl")
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.overlapped(), jaxddp.data_mesh(2))
    state = jax.eval_shape(
        lambda params: jaxddp.TrainState(jnp.int32(0), params, optax.sgd(0.1).init(params), jax.random.key(0)), params
    )
    batch = {name: jax.ShapeDtypeStruct((2, 128), jnp.int32) for name in ("tokens", "targets")}
    backward = [bucket.tensors[0] for bucket in trainer.plan(state, batch).buckets]
    assert len(backward) == 147
    assert sum(spec.num_elements for spec in backward) == 171_098_880
    assert [len(plan_buckets(backward, mib).buckets) for mib in (1, 10, 25, 100, 1000)] == [147, 66, 34, 7, 1]
    default = plan_all_reduces(backward)
    assert (default.names[0], default.buckets[-1].tensors) == ("head.kernel", (backward[-1],))  # the embedding alone
    assert len(default.buckets) == 11 and max(bucket.num_bytes for bucket in default.buckets) <= default.num_bytes / 8
    assert plan_all_reduces(backward, 25) == plan_buckets(backward, 25)
    assert plan_all_reduces(backward, rule="torch") == plan_buckets(backward, [1, 25], rule="torch")


@pytest.mark.parametrize(("num_tensors", "per_bucket"), [(25, 3), (26, 3), (28, 3), (29, 3), (32, 4), (100, 12)])
def test_the_default_of_all_reduces_is_an_eighth_and_at_least_25_mib(num_tensors, per_bucket):
    tensors = [TensorSpec(f"{index}", (2**21,), "float32") for index in range(num_tensors)]  # 8 MiB each
    sizes = [len(bucket) for bucket in names(plan_all_reduces(iter(tensors)))]
    assert sizes[:2] == [1, 3] and set(sizes[2:-1]) == {per_bucket} and 0 < sizes[-1] <= per_bucket
    assert sum(sizes) == num_tensors
    if num_tensors <= 25:  # 200 MiB
        assert plan_all_reduces(tensors) == plan_buckets(tensors)


def test_the_caps_of_all_reduces_grow_fourfold_to_an_eighth():
    tensors = [TensorSpec(f"{index}", (2**18,), "float32") for index in range(4000)]  # 1 MiB each
    sizes = [len(bucket) for bucket in names(plan_all_reduces(tensors))]
    assert sizes == [1, 25, 100, 400, *[500] * 6, 474]


def test_bad_input():
    for cap in (0, math.nan, "25", [], [25, 0]):
        assert f"bucket_mb (={cap!r}) must be a positive number of MiB" in refusal(plan_buckets, [], cap)
    assert "rule (='after') must be 'before' or 'torch'" in refusal(plan_buckets, [], 1, rule="after")


def test_packing_one_tensor_copies_nothing():
    tensor = jnp.ones((3, 4))
    bucket = plan_per_tensor([TensorSpec("a", (3, 4), "float32")]).buckets[0]
    assert pack(bucket, {"a": tensor}) is tensor
    assert unpack(bucket, tensor)["a"] is tensor


def test_pack_compiles_to_one_copy_and_unpack_adds_none():
    tensors = {name: jnp.ones((256, 256)) for name in "abcd"}
    bucket = plan_buckets(tensor_specs(tensors).values(), None).buckets[0]
    size = 4 * 256 * 256 * 4

    def through_a_bucket(tensors):
        parts = unpack(bucket, pack(bucket, tensors))
        return {name: part * 2 for name, part in parts.items()}

    memory = jax.jit(through_a_bucket).lower(tensors).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= size + 4096  # the buffer itself and nothing of its size beside it
