"""What tests compare with: trees within rounding, training on one device, a refusal in one line."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxddp
from jaxddp.communication.planned import planned_along
from jaxddp.strategy import Ranks

# The compiler of jax 0.11 crashes on an array without elements in a shard_map; 0.10 and 0.12 do not.
NUM_EMPTY = int(jax.__version_info__[:2] == (0, 11))


def assert_near(found, expected, atol=1e-12):
    """By default as near as sums of float64 in another order are."""
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=atol), found, expected)


def drawn(seed=0, dtype=np.float64, **shapes):
    """Arrays of normal numbers, by name."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def on_one_device(loss_fn, params, batches, optimizer):
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return params


def trained(trainer, state, batches):
    """The state after a step on each batch, and what the last one measured."""
    for batch in batches:
        state, metrics = trainer.step(state, batch)
    return state, metrics


def grid(*shape, names=("data", "model"), axis_type=AxisType.Auto):
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape), devices=devices)


def compiled_as_planned(trainer, state, batch):
    """The collectives of the compiled step's gradients, which must be those that are planned."""
    compiled = jaxddp.gradient_collectives(trainer.compile(state, batch))
    assert compiled == sorted(trainer.planned(state, batch))
    return compiled


def planned_collectives(strategy, plan, num_ranks, platform="gpu", *, num_microbatches=1):
    """The kind and the bytes on the wire of what a plan communicates in one step over one axis."""
    ranks = Ranks("data", num_ranks, num_ranks)
    return [(one.kind, one.num_bytes) for one in planned_along(strategy, plan, ranks, platform, num_microbatches)]


def mostly_full(quick, cases):
    """Cases for parametrize, of which all but the quick ones have the mark ``full``."""
    marks: Any = {True: (), False: pytest.mark.full}
    return [pytest.param(*(one if type(one) is tuple else (one,)), marks=marks[one in quick]) for one in cases]


def refusal(call, *args, **named):
    """The one line in which a call is refused."""
    with pytest.raises(ValueError) as caught:
        call(*args, **named)
    (line,) = str(caught.value).splitlines()
    return line
