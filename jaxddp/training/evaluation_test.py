"""What ``evaluate`` and aux values mean where a mean over ranks would be wrong."""

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


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_per_example_aux_is_refused(num_microbatches):
    def loss_fn(params, batch):
        out = batch["x"] @ params["w"]
        return jnp.mean(out), {"of_each": out}

    one = trainer(loss_fn, has_aux=True, num_microbatches=num_microbatches)
    with pytest.raises(ValueError, match=r"aux leaf 'of_each' .*one entry for each example"):
        one.step(one.init(PARAMS), batch())


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
