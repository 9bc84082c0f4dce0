import math

import jax
import jax.numpy as jnp
import optax

import jaxddp
from jaxddp.communication.buckets import TensorSpec, plan_all_reduces, plan_buckets, plan_per_tensor
from jaxddp.communication.reduction import pack, unpack
from jaxddp.comparison_test import refusal
from jaxddp.models import abstract
from jaxddp.tree import tensor_specs


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


def test_the_caps_of_all_reduces_grow_fourfold_to_an_eighth_and_at_least_25_mib():
    tensors = [TensorSpec(f"{index}", (2**18,), "float32") for index in range(4000)]  # 1 MiB each
    sizes = [len(bucket.tensors) for bucket in plan_all_reduces(iter(tensors)).buckets]
    assert sizes == [1, 25, 100, 400, *[500] * 6, 474]
    assert plan_all_reduces(tensors[:200]) == plan_buckets(tensors[:200])
    assert [len(bucket.tensors) for bucket in plan_all_reduces(tensors[:216]).buckets][:3] == [1, 25, 27]


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
