import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxddp import targets
from jaxddp.inspection import grid_step

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
            x = grid_step.block({name: leaf[layer] for name, leaf in params.items()}, x)
        return jnp.mean(x**2)

    grads = [jax.grad(loss_fn)(params, x) for x in batch]
    wanted = jax.tree.map(lambda param, *grads: param - 0.1 * sum(grads), params, *grads)

    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    state = grid_step.TrainState((), params, optimizer.init(params), ())
    found, loss = jax.jit(grid_step._step(mesh, optimizer))(state, batch)
    # rtol: rounding of float32 sums of 12 products, in another order, through three layers and back.
    assert loss == pytest.approx(float(sum(loss_fn(params, x) for x in batch)), rel=1e-5)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(found.params[name], leaf, rtol=1e-5, atol=1e-6)


def test_a_leaf_lies_as_the_parameter_that_it_mirrors():
    state = jax.eval_shape(optax.adamw(0.1).init, shapes(3))
    lies = jax.tree_util.tree_map_with_path(lambda path, leaf: (leaf.ndim, grid_step._spec(path)), state)
    wide, back = (3, PartitionSpec(None, "fsdp", "tp")), (3, PartitionSpec(None, "tp", "fsdp"))
    adam = lies[0]
    assert adam.mu == adam.nu == {"gate": wide, "up": wide, "down": back}
    assert adam.count == (0, PartitionSpec())


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"width": 10}, "width (=10) must be divisible by fsdp (=4)"),
        ({"hidden": 9}, "hidden (=9) must be divisible by tp (=2)"),
    ],
)
def test_what_cannot_be_divided_is_refused(sizes, said):
    batch = jax.ShapeDtypeStruct((1, TOKENS, sizes.get("width", WIDTH)), jnp.bfloat16)
    with pytest.raises(ValueError) as raised:
        grid_step.start_grid_step(targets.target("h100:8"), shapes(**sizes), batch, optax.sgd(0.1), fsdp=4, tp=2)
    assert str(raised.value) == said
