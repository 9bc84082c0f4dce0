import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp.models import abstract


def test_automatic_caps_need_a_network():
    with pytest.raises(ValueError, match=r"^bucket_mb \(='auto'\) must come with network=, in 10\^9 bytes per second"):
        jaxddp.bucketed("auto")


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_a_network_out_of_range_is_refused(speed):
    with pytest.raises(ValueError, match=r"^network gb_per_s \(=.*\) must be a positive finite number .*$"):
        jaxddp.bucketed("auto", network=speed)


def test_automatic_caps_that_were_not_chosen_are_refused():
    loss_fn, params = abstract("tiny")
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), jaxddp.bucketed("auto", network=50), jaxddp.data_mesh(2))
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    expected = r"^bucket_mb \(='auto'\) must be chosen first: call jaxddp.tune_buckets\(trainer, state, batch\)$"
    with pytest.raises(ValueError, match=expected):
        trainer.plan(trainer.abstract_state(params), batch)
    with pytest.raises(ValueError, match=expected):
        jaxddp.plan_gradients(jaxddp.bucketed("auto", network=50), jax.grad(lambda x: jnp.sum(x**2)), jnp.ones(3))
