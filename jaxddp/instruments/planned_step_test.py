from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxddp import targets
from jaxddp.instruments.verify import (
    _grid_step,
    _spec,
    block,
    start_planned_step,
)
from jaxddp.planning.cost.workload import feed_forward
from jaxddp.planning.machine import cluster_of
from jaxddp.planning.plan import TrainingJob, plan
from jaxddp.training.step import TrainState

H100 = cluster_of(targets.target("h100:8"), "bfloat16")
V5P = cluster_of(targets.target("v5p:64"), "bfloat16")
GRID = TrainingJob(feed_forward(64, 256, 2), H100, fsdp=4, tp=2, tokens=64)


@pytest.mark.parametrize(
    ("job", "dtype", "said"),
    [
        (replace(GRID, fsdp=2), "bfloat16",
         "fsdp x tp (=2 x 2) must be the 8 devices of 'h100:8' to be compiled, without replicas"),
        (replace(GRID, stage=1), "bfloat16", "stage (=1) must be 3 for matrices cut by tp (=2) to be compiled"),
        (TrainingJob(GRID.workload, V5P, fsdp=8, tp=8, tokens=64), "bfloat16",
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


LAYERS, WIDTH, HIDDEN, TOKENS = 3, 8, 12, 16


def shapes(num_matrices=2, width=WIDTH, hidden=HIDDEN):
    wide = jax.ShapeDtypeStruct((LAYERS, width, hidden), jnp.float32)
    names = ("up",) if num_matrices == 2 else ("gate", "up")
    return {**dict.fromkeys(names, wide), "down": jax.ShapeDtypeStruct((LAYERS, hidden, width), jnp.float32)}


def test_a_step_on_a_grid_is_the_step_of_one_device():
    num_matrices, num_microbatches = 3, 2
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) / leaf.shape[1] ** 0.5
        for name, leaf in shapes(num_matrices).items()
    }
    batch = jnp.asarray(rng.normal(size=(num_microbatches, TOKENS // num_microbatches, WIDTH)), jnp.float32)
    optimizer = optax.sgd(0.1)

    def loss_fn(params, x):
        for layer in range(LAYERS):
            x = block({name: leaf[layer] for name, leaf in params.items()}, x)
        return jnp.mean(x**2)

    grads = [jax.grad(loss_fn)(params, x) for x in batch]
    wanted = jax.tree.map(lambda param, *grads: param - 0.1 * sum(grads), params, *grads)

    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    state = TrainState((), params, optimizer.init(params), ())
    found, loss = jax.jit(_grid_step(mesh, optimizer))(state, batch)
    # rtol: rounding of float32 sums of 12 products, in another order, through three layers and back.
    assert loss == pytest.approx(float(sum(loss_fn(params, x) for x in batch)), rel=1e-5)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(found.params[name], leaf, rtol=1e-5, atol=1e-6)


def test_masters_on_a_grid_keep_updates_that_their_copies_lose():
    masters = {name: jnp.ones(leaf.shape, jnp.float32) for name, leaf in shapes().items()}
    copies = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), masters)
    optimizer = optax.chain(optax.scale_by_sign(), optax.scale(-(2.0**-10)))
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    step = jax.jit(_grid_step(mesh, optimizer))
    state = TrainState((), masters, optimizer.init(masters), (), copies=copies)
    for count in range(1, 4):
        state, _ = step(state, jnp.ones((1, TOKENS, WIDTH), jnp.bfloat16))
        for name, leaf in state.params.items():
            np.testing.assert_array_equal(leaf, 1 - count * 2.0**-10)  # exact in float32
            np.testing.assert_array_equal(state.copies[name], leaf.astype(jnp.bfloat16))


def test_a_leaf_is_sharded_as_the_parameter_that_it_mirrors():
    state = jax.eval_shape(optax.adamw(0.1).init, shapes(3))
    shardings = jax.tree_util.tree_map_with_path(lambda path, leaf: (leaf.ndim, _spec(path)), state)
    wide, back = (3, PartitionSpec(None, "fsdp", "tp")), (3, PartitionSpec(None, "tp", "fsdp"))
    adam = shardings[0]
    assert adam.mu == adam.nu == {"gate": wide, "up": wide, "down": back}
    assert adam.count == (0, PartitionSpec())
