"""``value_and_grad`` compiled for machines that are not here: the collectives are those planned."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxddp
from jaxddp import targets
from jaxddp.communication.buckets import TensorSpec
from jaxddp.communication.planned import planned_collectives
from jaxddp.instruments.targets import compile_for_target

STRATEGIES = [jaxddp.bucketed(3e-4), jaxddp.naive(), jaxddp.flat(), jaxddp.overlapped()]
CASES = [(spec, strategy) for spec in ("h100:8", "v5p:8") for strategy in STRATEGIES]
SHAPES = {"up": (8, 12), "down": (12, 1), "bias": (1,), "linear": (40,), "unused": (3,)}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]) ** 2) + params["linear"].sum()


@pytest.mark.parametrize(
    ("spec", "strategy"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.full) for case in CASES[1:])]
)
def test_planned_is_compiled(spec, strategy):
    mesh, platform = targets.mesh(spec), targets.target(spec).platform
    args = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}, jnp.ones((16, 8))
    step = jax.shard_map(jaxddp.value_and_grad(loss_fn, strategy), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    program = compile_for_target(
        targets.target(spec), step, args, compiler_options=jaxddp.compile_options(strategy, platform),
        in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))),
    )  # fmt: skip
    in_order = [TensorSpec(name, SHAPES[name], "float32") for name in ("linear", "bias", "down", "up")]
    planned = planned_collectives(strategy, strategy.plan(in_order), 8, platform)
    assert sorted(jaxddp.gradient_collectives(program)) == sorted(planned)
