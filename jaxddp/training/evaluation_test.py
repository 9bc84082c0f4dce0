"""What ``evaluate`` and aux values mean where a mean over ranks would be wrong."""

import functools

import jax
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


def dropped(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return jnp.mean(jnp.where(keep, batch["x"], 0) @ params["w"])


def test_evaluate_draws_nothing_where_the_key_has_a_default():
    def loss_fn(params, batch, key=None):
        return jnp.mean(batch["x"] @ params["w"]) if key is None else dropped(params, batch, key)

    one = trainer(loss_fn)
    found = one.evaluate(one.init(PARAMS), batch())
    np.testing.assert_allclose(found, loss_fn(PARAMS, batch()), rtol=1e-6)


def test_evaluate_refuses_a_loss_that_cannot_go_without_a_key():
    one = trainer(dropped)
    with pytest.raises(ValueError, match=r"evaluate gives no key.*key=None"):
        one.evaluate(one.init(PARAMS), batch())


def test_evaluate_gives_aux_as_well():
    def loss_fn(params, batch):
        out = batch["x"] @ params["w"]
        return jnp.mean(out), {"square": jnp.mean(out**2)}

    one = trainer(loss_fn, has_aux=True)
    loss, aux = one.evaluate(one.init(PARAMS), batch())
    expected, expected_aux = loss_fn(PARAMS, batch())
    np.testing.assert_allclose([loss, aux["square"]], [expected, expected_aux["square"]], rtol=1e-6)


PER_EXAMPLE = {
    "rows": lambda each: each[:, 0],
    "flat": lambda each: each.reshape(-1),
    "columns": lambda each: each.T,
    "first": lambda each: each[:3],
    "list": list,
    "total": lambda each: jaxddp.Weighted(each[:, 0], len(each)),
    "weight": lambda each: jaxddp.Weighted(each.sum(), each[:, 0] * 0 + 1),
}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("kind", PER_EXAMPLE)
def test_per_example_aux_is_refused(kind, num_microbatches):
    def loss_fn(params, batch):
        out = batch["x"] * params["w"]
        return jnp.mean(out), {"mean": jnp.mean(out), "of_each": PER_EXAMPLE[kind](out)}

    one = trainer(loss_fn, has_aux=True, num_microbatches=num_microbatches)
    with pytest.raises(ValueError, match=r"aux leaf 'of_each.* has an entry for each example"):
        one.step(one.init(PARAMS), batch(16))


def test_aux_is_refused_where_it_cannot_be_traced_for_another_number_of_examples():
    def loss_fn(params, batch, is_mean=False):
        out = (batch["x"] @ params["w"]).reshape(2, 2)
        each = out.reshape(-1)
        return jnp.mean(out), {"of_each": jaxddp.Weighted(each, 1) if is_mean else each, "three": jnp.ones(3)}

    one = trainer(loss_fn, has_aux=True)
    with pytest.raises(
        ValueError, match=r"'of_each' \(=\[4\]\) may have an entry for each of 4 .*Weighted\(value, 1\)"
    ):
        one.step(one.init(PARAMS), batch())
    other = trainer(functools.partial(loss_fn, is_mean=True), has_aux=True)
    _, metrics = other.step(other.init(PARAMS), batch())
    np.testing.assert_allclose(metrics["aux"]["of_each"], np.mean((batch()["x"].sum(1)).reshape(2, 4), 0))


def test_aux_that_is_only_as_long_as_the_batch_is_averaged():
    def loss_fn(params, batch):
        out = batch["x"] @ params["w"]
        return jnp.mean(out), {"moments": jnp.stack([jnp.mean(out**k) for k in range(4)])}  # 4 rows a rank as well

    one = trainer(loss_fn, has_aux=True)
    _, metrics = one.step(one.init(PARAMS), batch())
    np.testing.assert_allclose(metrics["aux"]["moments"], loss_fn(PARAMS, batch())[1]["moments"], rtol=1e-5)


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
