import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp.communication import compression
from jaxddp.models import abstract
from jaxddp.planning.network import Network


def test_automatic_caps_need_a_network():
    with pytest.raises(ValueError, match=r"^bucket_mb \(='auto'\) must come with network=, in 10\^9 bytes per second"):
        jaxddp.bucketed("auto")


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_a_network_out_of_range_is_refused(speed):
    with pytest.raises(ValueError, match=r"^network gb_per_s \(=.*\) must be a positive finite number .*$"):
        jaxddp.bucketed("auto", network=speed)


def test_automatic_caps_outside_a_trainer_are_refused():
    with pytest.raises(ValueError, match=r"^bucket_mb \(='auto'\) must be resolved by a Trainer: elsewhere give"):
        jaxddp.plan_gradients(jaxddp.bucketed("auto", network=50), jax.grad(jnp.sum), jnp.ones(3))


@pytest.mark.parametrize("network", [50, Network(50, latency_us=5)])
def test_automatic_caps_need_an_accelerator_that_is_known(network):
    loss_fn, params = abstract("tiny")
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), jaxddp.bucketed("auto", network=network), jaxddp.data_mesh(2))
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    with pytest.raises(ValueError, match=r"^device kind \(='cpu'\) must be one of a known chip: h100, .*$"):
        trainer.plan(trainer.abstract_state(params), {"tokens": tokens, "targets": tokens})


def test_the_caps_are_those_that_tuning_picks(monkeypatch):
    seen = []

    def pick(timing, network, rule):
        seen.append((timing, network, rule))
        return [1, 8]

    monkeypatch.setattr("jaxddp.simulation.tuning.best_caps", pick)
    strategy = jaxddp.bucketed("auto", network=50, rule="torch", compression=compression.noop)
    assert strategy.tune is not None
    tuned = strategy.tune("timing")
    assert seen == [("timing", Network(50), "torch")]
    tensors = [jaxddp.TensorSpec(str(index), (2**18,), "float32") for index in range(10)]
    assert tuned.plan(tensors) == jaxddp.bucketed([1, 8], rule="torch").plan(tensors)
    assert tuned.compression == compression.noop and tuned.tune is None
