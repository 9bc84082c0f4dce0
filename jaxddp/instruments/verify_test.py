"""What marks a compiled step that is not as planned; ``cli/plan_test.py`` compiles steps that are."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp import targets
from jaxddp.instruments.inspect import Training
from jaxddp.instruments.verify import compare, plan_stages

H100 = targets.target("h100:2")


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)


SHAPES = {"up": (13, 7), "down": (7, 3)}
TRAINING = Training(
    loss_fn, optax.adamw(1e-3), {name: jnp.zeros(shape) for name, shape in SHAPES.items()}, jnp.zeros((4, 13))
)


@pytest.fixture(scope="module")
def compiled():
    (plan,) = plan_stages(TRAINING, H100, [1])
    trainer = jaxddp.Trainer(loss_fn, TRAINING.optimizer, jaxddp.zero1(), targets.mesh("h100:2"))
    state = trainer.abstract_state(TRAINING.shapes().params)
    return plan, trainer.compile(state, jax.ShapeDtypeStruct((4, 13), jnp.float32)), state


def failed(plan, program, state):
    found = compare(plan, program, state, H100)
    assert found.holds == (not [row for row in found.rows if row.holds is False])
    return {row.label for row in found.rows if row.holds is False}


def test_a_step_as_planned_and_plans_off_by_a_byte(compiled):
    plan, program, state = compiled
    assert failed(plan, program, state) == set()
    for name in ("parameters", "optimizer_state"):
        off = plan.__class__(**{**vars(plan), name: getattr(plan, name) + 1})
        assert failed(off, program, state) == {name.replace("_", " ")}
    halved = tuple((kind, num_bytes // 2) for kind, num_bytes in plan.collectives)
    off = plan.__class__(**{**vars(plan), "collectives": halved})
    assert failed(off, program, state) == {"all-gather buffers", "reduce-scatter buffers"}


def test_what_no_stage_takes_is_refused():
    with pytest.raises(ValueError, match=r"batch \(=3 examples\)"):
        plan_stages(TRAINING._replace(batch=jnp.zeros((3, 13))), H100)
