from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxddp import targets
from jaxddp.inspection.plan_step import start_planned_step, with_master
from jaxddp.models import SIZES
from jaxddp.planning.cost.workload import feed_forward, transformer
from jaxddp.planning.job import Job
from jaxddp.planning.machine import cluster_of
from jaxddp.planning.plan import plan
from jaxddp.targets import compile as target_compile

H100 = cluster_of(targets.target("h100:8"), "bfloat16")
V5P = cluster_of(targets.target("v5p:64"), "bfloat16")
GRID = Job(feed_forward(64, 256, 2), H100, fsdp=4, tp=2, tokens=64)


@pytest.mark.parametrize(
    ("job", "dtype", "said"),
    [
        (replace(GRID, fsdp=2), "bfloat16",
         "fsdp x tp (=2 x 2) must be the 8 devices of 'h100:8' to be compiled, without replicas"),
        (replace(GRID, stage=1), "bfloat16", "stage (=1) must be 3 for matrices cut by tp (=2) to be compiled"),
        (Job(GRID.workload, V5P, fsdp=8, tp=8, tokens=64), "bfloat16",
         "fsdp x tp (=8 x 8) must be whole axes of 4x4x4 each to be compiled"),
        (replace(GRID, workload=feed_forward(62, 256)), "bfloat16", "width (=62) must be divisible by fsdp (=4)"),
        (replace(GRID, workload=feed_forward(64, 255)), "bfloat16", "hidden (=255) must be divisible by tp (=2)"),
        (GRID, "float8", "dtype (='float8') must be one of bfloat16, float16, float32 to be compiled"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(job, dtype, said):
    with pytest.raises(ValueError) as raised:
        start_planned_step(plan(job), dtype)
    assert str(raised.value) == said


def test_matrices_of_a_transformer_are_not_cut():
    counts = transformer(vocab=64, context=16, width=16, num_layers=2, num_heads=2, hidden=32)
    job = replace(GRID, workload=counts, sequence_length=16, tokens=1024)
    with pytest.raises(ValueError, match=r"^tp \(=2\) must be 1 for a transformer to be compiled: only feed-forward"):
        start_planned_step(plan(job), "bfloat16", SIZES["tiny"])


def test_a_missing_compiler_is_told_first(monkeypatch):
    monkeypatch.setattr(target_compile, "find_spec", lambda name: None)
    job = Job(GRID.workload, cluster_of(targets.target("v5p:8"), "bfloat16"), fsdp=2, tokens=64)  # with replicas
    with pytest.raises(ValueError) as raised:
        start_planned_step(plan(job), "bfloat16")
    assert str(raised.value) == "target 'v5p:8' needs the TPU compiler and flatbuffers: pip install 'jaxddp[targets]'"


def test_a_master_is_updated_in_float32_and_the_parameters_are_its_rounded_values():
    rng = np.random.default_rng(0)
    exact = {"w": jnp.asarray(rng.normal(size=(7, 5)), jnp.float32)}
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), exact)
    plain = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    inner = optax.adamw(1e-4)  # steps that bfloat16 alone would lose
    outer = with_master(inner)
    state, plain_state = outer.init(params), inner.init(plain)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) == 12 * 35 + 4  # and a count
    for _ in range(5):
        grads = {"w": jnp.asarray(rng.normal(size=(7, 5)), jnp.bfloat16)}
        updates, state = outer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
        updates, plain_state = inner.update(wide, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        assert params["w"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(params["w"], plain["w"].astype(jnp.bfloat16))
