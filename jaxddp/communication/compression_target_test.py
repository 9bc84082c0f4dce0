"""What compressed gradients compile to for GPUs that are not here."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp import targets
from jaxddp.communication import compression
from jaxddp.models import abstract


@pytest.mark.full
def test_compiled_is_planned_on_8_gpus():
    """On CPUs every test of compression_test.py that trains asserts it."""
    loss_fn, params = abstract("toy")
    batch = {"x": jax.ShapeDtypeStruct((16, 10), jnp.float32), "y": jax.ShapeDtypeStruct((16, 5), jnp.float32)}
    how = {
        jaxddp.bucketed(0.0003, compression=compression.bf16): "all-reduce",
        jaxddp.bucketed(0.0005, compression=compression.powersgd(2)): "all-reduce",
        jaxddp.zero1(0.0003, compression=compression.fp16): "reduce-scatter",
    }
    started = []
    for strategy, kind in how.items():
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, targets.mesh("h100:8"))
        state = trainer.abstract_state(params)
        started.append((kind, trainer.planned(state, batch), targets.start_compile(trainer, state, batch)))
    for kind, planned, pending in started:
        schedule = jaxddp.read_schedule(pending.result())
        assert schedule.gradient_collectives() == sorted(planned)
        assert len([one for one in planned if one[0] == kind]) > 1 and schedule.notes == ()
