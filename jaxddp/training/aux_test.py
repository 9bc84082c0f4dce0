"""What aux values mean where a mean over ranks would be wrong, and those that are refused."""

import functools
from collections import Counter

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp


def trainer(loss_fn, num_ranks=2, **options):
    return jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh(num_ranks), **options)


def batch(rows=8):
    return {"x": jnp.arange(rows * 3.0).reshape(rows, 3)}


PARAMS = {"w": np.ones(3, np.float32)}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_per_example_aux_is_refused(num_microbatches):
    def loss_fn(params, batch):
        out = batch["x"] * params["w"]
        return jnp.mean(out), {"mean": jnp.mean(out), "of_each": out[:, 0]}

    one = trainer(loss_fn, has_aux=True, num_microbatches=num_microbatches)
    with pytest.raises(ValueError, match=r"aux leaf 'of_each.* if it has an entry for each example"):
        one.step(one.init(PARAMS), batch(16))


def test_arrays_are_marked():
    def loss_fn(params, batch, is_marked):
        out = batch["x"] @ params["w"]
        moments = jnp.stack([jnp.mean(out**k) for k in range(4)])  # as long as a rank's part of the batch
        return jnp.mean(out), {"moments": jaxddp.Weighted(moments, 1) if is_marked else moments}

    one = trainer(functools.partial(loss_fn, is_marked=False), has_aux=True)
    with pytest.raises(ValueError, match=r"^aux leaf 'moments' \(=\[4\]\) must be marked: .*Weighted\(value, 1\)"):
        one.step(one.init(PARAMS), batch())
    one = trainer(functools.partial(loss_fn, is_marked=True), has_aux=True)
    _, metrics = one.step(one.init(PARAMS), batch())
    np.testing.assert_allclose(metrics["aux"]["moments"], loss_fn(PARAMS, batch(), False)[1]["moments"], rtol=1e-5)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", [jaxddp.bucketed(), jaxddp.zero3(min_shard_elements=0)], ids=lambda one: one.name)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_marked_values_are_those_of_all_examples(strategy, num_microbatches):
    def loss_fn(params, batch):
        out = batch["x"] * params["w"]
        each = out.sum(1)
        marked = {
            "mean": jaxddp.Mean(out),
            "sum": jaxddp.Sum(each.astype(jnp.float16)),  # of numbers above 2^11, where float16 has no odd ones
            "count": jaxddp.Sum(out > 20),
            "each": jaxddp.PerExample(each > 20),
            "rows": jaxddp.PerExample(out),
        }
        return jaxddp.Weighted(jnp.sum(each[:2]), 2), marked  # whose weights are the loss's alone

    one = jaxddp.Trainer(
        loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(2), has_aux=True, num_microbatches=num_microbatches
    )
    state, full = one.init(PARAMS), batch(48)["x"]
    compiled = jaxddp.read_schedule(one.compile(state, batch(48)))
    assert sorted(compiled.gradient_collectives()) == sorted(one.planned(state, batch(48)))
    kinds = Counter(each.kind for each in compiled.collectives() if each.is_metrics)
    norm = strategy.name == "zero3"  # whose squares are summed apart
    assert kinds == {"all-reduce": 2 + norm, "all-gather": 2}
    state, metrics = one.step(state, batch(48))
    expected = {"mean": full.mean(0), "sum": full.sum(), "count": (full > 20).sum(0), "each": full.sum(1) > 20}
    for name, value in (expected | {"rows": full}).items():
        np.testing.assert_allclose(metrics["aux"][name], value, rtol=1e-6)
    assert metrics["aux"]["count"].dtype == jnp.int32
    if num_microbatches == 1:
        _, aux = one.evaluate(state, batch(48))
        np.testing.assert_array_equal(aux["each"].shape, (48,))


def test_marks_need_a_value_for_each_example():
    one = trainer(lambda params, batch: (params["w"].sum(), {"of_each": jaxddp.Mean(batch["x"][:2])}), has_aux=True)
    with pytest.raises(
        ValueError, match=r"^aux leaf 'of_each' \(=Mean of array of \[2, 3\]\) must have the 4 examples"
    ):
        one.step(one.init(PARAMS), batch())


def test_counts_are_refused():
    def loss_fn(params, batch):
        out = batch["x"] @ params["w"]
        return jnp.mean(out), {"positive": jnp.sum(out > 0)}

    one = trainer(loss_fn, has_aux=True)
    with pytest.raises(ValueError, match=r"aux leaf 'positive' \(=int32\).*jaxddp\.Weighted"):
        one.step(one.init(PARAMS), batch())


def test_a_count_with_its_weight_is_a_share():
    def loss_fn(params, batch):
        out = batch["x"] @ params["w"]
        return jnp.mean(out), {"positive": jaxddp.Weighted(jnp.sum(out > 30), out.size)}

    one = trainer(loss_fn, has_aux=True)
    _, metrics = one.step(one.init(PARAMS), batch())
    np.testing.assert_allclose(metrics["aux"]["positive"], 0.5)
