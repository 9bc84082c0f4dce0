"""Loss functions as users write them, with their parameters in shards: gradients, and how often units are gathered."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxddp
from jaxddp.communication.traces import nested
from jaxddp.comparison_test import assert_near, compiled_as_planned

WIDTH, NUM_LAYERS = 8, 3
SHARDED = jaxddp.zero3(min_shard_elements=0)
dense = jaxddp.layer(lambda params, x: jnp.tanh(x @ params["kernel"] + params["bias"]))


def mean_square(x, batch):
    return jnp.mean((x - batch["y"]) ** 2)


def chain(layers, x, unit=dense):
    for params in layers:
        x = unit(params, x)
    return x


def loop(params, batch):
    return mean_square(chain(params["layers"], batch["x"]), batch)


def scan(params, batch, **options):
    x, norms = lax.scan(lambda x, one: (dense(one, x), jnp.sum(x**2)), batch["x"], params["stack"], **options)
    return mean_square(x, batch) + jnp.dot(jnp.arange(NUM_LAYERS), norms) / len(x)


def scan_written_out(params, batch):
    return scan(params, batch, unroll=True, reverse=True)


def scan_with_rounds_left_over(params, batch):
    return scan(params, batch, unroll=NUM_LAYERS - 1)


def scan_of_checkpoints(params, batch):
    body = jax.checkpoint(lambda x, one: (dense(one, x), None))
    return mean_square(lax.scan(body, batch["x"], params["stack"])[0], batch)


def scan_in_a_scan(params, batch):
    def inner(x, stack):
        return lax.scan(lambda x, one: (dense(one, x), None), x, stack)[0], None

    return mean_square(lax.scan(inner, batch["x"], params["stacks"])[0], batch)


def each_in_a_jit(params, batch):
    return mean_square(chain(params["layers"], batch["x"], jax.jit(lambda one, x: dense(one, x))), batch)


def a_checkpoint_in_each(params, batch):
    unit = jaxddp.layer(jax.checkpoint(lambda one, x: jnp.tanh(x @ one["kernel"] + one["bias"])))
    return mean_square(chain(params["layers"], batch["x"], unit), batch)


def each_in_a_checkpoint(params, batch):
    return mean_square(chain(params["layers"], batch["x"], jax.checkpoint(lambda one, x: dense(one, x))), batch)


def two_in_a_checkpoint(params, batch):
    first, *others = params["layers"]
    x = jax.checkpoint(lambda others, x: chain(others, x))(others, batch["x"])
    return mean_square(dense(first, x), batch)


def one_unit_twice(params, batch):
    layers = params["layers"]
    return mean_square(chain([layers[0], layers[1], layers[0]], batch["x"]), batch)


def vmapped_over_examples(params, batch):
    return mean_square(jax.vmap(lambda x: chain(params["layers"], x))(batch["x"]), batch)


def penalty_over_leaves(params, batch):
    leaves = jax.tree.leaves(params["layers"])
    penalty = sum(jnp.sum(leaf**2) for leaf in leaves if leaf.ndim > 1) / sum(leaf.size for leaf in leaves)
    return loop(params, batch) + penalty


def gradient_inside(params, batch):
    grads = jax.grad(lambda one: jnp.sum(dense(one, jnp.ones((1, WIDTH)))))(params["layers"][0])
    return loop(params, batch) + sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads))


def used_outside_and_closed_over(params, batch):
    kernel = params["layers"][0]["kernel"]
    unit = jaxddp.layer(lambda one, x: dense(one, x @ kernel))
    return mean_square(unit(params["layers"][1], jnp.einsum("bi,ij->bj", batch["x"], kernel)), batch)


def keys(params, batch, key):
    unit = jaxddp.layer(lambda one, x, key: dense(one, x) * jax.random.bernoulli(key, 1.0, x.shape))
    return mean_square(chain(params["layers"], batch["x"], lambda one, x: unit(one, x, key)), batch)


def linen_modules(params, batch):
    apply = nn.Dense(WIDTH, param_dtype=jnp.float64).apply
    return mean_square(chain(params["layers"], batch["x"], lambda one, x: apply({"params": one}, x)), batch)


def nnx_modules_in_units(params, batch):
    graph, _ = nnx.split(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))

    @jaxddp.layer
    def unit(one, x):
        return nnx.merge(graph, nnx.State({name: nnx.Param(leaf) for name, leaf in one.items()}))(x)

    return mean_square(chain(params["layers"], batch["x"], unit), batch)


def one_gradient_is_constant(params, batch):
    layer = params["layers"][0]
    return jnp.sum(layer["bias"] * np.arange(WIDTH)) + mean_square(batch["x"] @ layer["kernel"], batch)


def all_gradients_are_constant(params, batch):
    return jnp.sum(params["layers"][0]["bias"] * np.arange(WIDTH))


def one_unit_thrice_and_another(params, batch):
    return mean_square(chain(params["layers"][:1] * 3 + params["layers"][1:2], batch["x"]), batch)


linear = jaxddp.layer(lambda one, x: x @ one["kernel"])


def a_unit_that_is_unused(params, batch):
    unused = jaxddp.layer(lambda one, x: x * 2.0)
    return mean_square(unused(params["layers"][1], linear(params["layers"][0], batch["x"])), batch)


def a_unit_with_a_part_unused(params, batch):
    unit = jaxddp.layer(lambda one, x: jnp.tanh(x @ one["used"]["kernel"]))
    return mean_square(unit({"used": params["layers"][0], "unused": params["layers"][1]}, batch["x"]), batch)


def a_unit_without_gradients(params, batch):
    signs = jaxddp.layer(lambda one, x: jnp.where(one["kernel"][0] > 0.1, x, -x))
    return mean_square(signs(params["layers"][1], linear(params["layers"][0], batch["x"])), batch)


# A unit is gathered in the forward and in the backward; a loop's last one keeps its parameters.
AS_PLANNED = (
    gradient_inside, one_gradient_is_constant, all_gradients_are_constant, one_unit_thrice_and_another,
    a_unit_that_is_unused, a_unit_with_a_part_unused, a_unit_without_gradients,
)  # fmt: skip
UNROLLED, EVERY_ONE_TWICE = 2 * NUM_LAYERS - 1, 2 * NUM_LAYERS
GATHERS = {
    loop: UNROLLED,
    scan: EVERY_ONE_TWICE,
    scan_written_out: UNROLLED,
    scan_with_rounds_left_over: EVERY_ONE_TWICE,
    scan_of_checkpoints: EVERY_ONE_TWICE,
    scan_in_a_scan: 2 * EVERY_ONE_TWICE,
    each_in_a_jit: UNROLLED,
    a_checkpoint_in_each: UNROLLED,
    each_in_a_checkpoint: EVERY_ONE_TWICE,
    two_in_a_checkpoint: 2 + 1 + 2 + 1,  # the last of a checkpoint keeps its own when it is computed again
    one_unit_twice: UNROLLED,
    vmapped_over_examples: UNROLLED,
    penalty_over_leaves: 1 + UNROLLED,  # kernels first, biases in units
    **dict.fromkeys(AS_PLANNED),
    used_outside_and_closed_over: 1 + 1,
    keys: UNROLLED,
    linen_modules: 1,
    nnx_modules_in_units: UNROLLED - 1,  # the backward of the first, which is linear, needs no parameters
}


@pytest.mark.sample
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("loss_fn", GATHERS, ids=lambda loss_fn: loss_fn.__name__)
def test_gradients_are_those_of_one_device_and_units_are_gathered_when_used_as_planned(x64, loss_fn, num_microbatches):
    rng = np.random.default_rng(0)
    layers = [{"kernel": rng.normal(size=(WIDTH, WIDTH)), "bias": rng.normal(size=WIDTH)} for _ in range(NUM_LAYERS)]
    params = {"layers": layers}
    if loss_fn.__name__.startswith("scan"):
        params = {"stack": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}
    if loss_fn is scan_in_a_scan:
        params = {"stacks": jax.tree.map(lambda *leaves: np.stack([leaves, leaves]), *layers)}
    batch = {name: rng.normal(size=(12, WIDTH)) for name in "xy"}
    args = (jax.random.key(0),) if loss_fn is keys else ()
    expected = jax.jit(jax.grad(loss_fn))(jax.tree.map(jnp.asarray, params), batch, *args)
    mesh = jaxddp.data_mesh(2)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), SHARDED, mesh, num_microbatches=num_microbatches)
    state = trainer.init(params)
    gathers = [kind for kind, _ in compiled_as_planned(trainer, state, batch)].count("all-gather")
    after, _ = trainer.step(state, batch)
    grads = jax.tree.map(lambda old, new: old - new, params, trainer.params(after))
    assert GATHERS[loss_fn] in (None, gathers / num_microbatches)
    assert_near(grads, expected)  # of float64 parameters of size 1, from which gradients are told


def test_a_unit_computes_again_what_a_checkpoint_in_it_does_not_save_and_else_no_product():
    layers = [{"kernel": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)}] * NUM_LAYERS
    batch = {name: jnp.ones((4, WIDTH)) for name in "xy"}

    def num_products(loss_fn, strategy):
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), strategy, jaxddp.data_mesh(2))
        state = trainer.init({"layers": layers})
        program = trainer.programs(state).trace(state, batch).program
        return sum(one.primitive.name == "dot_general" for equation in program.jaxpr.eqns for one in nested(equation))

    again, wanted = (
        num_products(a_checkpoint_in_each, one) - num_products(loop, one) for one in (SHARDED, jaxddp.naive())
    )
    assert again == wanted > 0
    assert num_products(loop, SHARDED) == 3 * NUM_LAYERS  # forward, and the gradients of both factors


def cast_alone(one, x):
    return x @ one["kernel"].astype(x.dtype) + one["bias"].astype(x.dtype)


def cast_in_a_call(one, x):
    return jax.checkpoint(cast_alone)(one, x)


def cast_in_part(one, x):
    return jnp.where(one["bias"] > 0, x, -x) @ one["kernel"].astype(x.dtype)


def cast_twice(one, x):
    return cast_alone(one, x) + x @ one["kernel"].astype(x.dtype)


def cast_and_kept(one, x):
    return cast_alone(one, x) + 0 * one["kernel"].sum().astype(x.dtype)


def cast_twice_and_a_part_unused(one, x):
    return (x @ one["kernel"].astype(x.dtype)) * 2 + x @ one["kernel"].astype(x.dtype)


@jax.custom_vjp
def narrow(leaf):
    return leaf.astype(jnp.bfloat16)


narrow.defvjp(lambda leaf: (narrow(leaf), leaf), lambda leaf, grad: (grad.astype(jnp.float32) + leaf,))


def cast_with_a_derivative_of_its_own(one, x):
    return x @ narrow(one["kernel"]) + narrow(one["bias"])


NARROW = (cast_alone, cast_in_a_call)
CASTS = (*NARROW, cast_in_part, cast_twice, cast_and_kept, cast_twice_and_a_part_unused,
         cast_with_a_derivative_of_its_own)  # fmt: skip


@pytest.mark.parametrize("fn", CASTS, ids=lambda fn: fn.__name__)
def test_a_unit_that_casts_all_it_takes_gathers_it_in_that_dtype(fn):
    """With equal examples on both ranks, whose mean is exact: bit for bit what a strategy without gathers gives."""
    unit, draw = jaxddp.layer(fn), np.random.default_rng(0).normal

    def loss_fn(params, x):
        return jnp.mean(chain(params, x.astype(jnp.bfloat16), unit).astype(jnp.float32))

    shapes = {"kernel": (WIDTH, WIDTH), "bias": WIDTH}
    params = [{name: draw(size=shape).astype("f") for name, shape in shapes.items()} for _ in range(2)]
    batch, trained = np.tile(draw(size=(2, WIDTH)).astype("f"), (2, 1)), []
    for strategy in (jaxddp.naive(), SHARDED):
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), strategy, jaxddp.data_mesh(2))
        state = trainer.init(params)
        found = compiled_as_planned(trainer, state, batch)
        trained.append(trainer.params(trainer.step(state, batch)[0]))
    assert {size for kind, size in found if kind == "all-gather"} == {(2 if fn in NARROW else 4) * (WIDTH + 1) * WIDTH}
    jax.tree.map(np.testing.assert_array_equal, *trained)


def test_a_parameter_that_is_asked_for_and_never_read_is_an_array():
    dense_unit = jaxddp.layer(lambda kernel, x: x @ kernel)

    def loss_fn(params, batch):
        assert jnp.asarray(params["unused"]).shape == (4, 4)  # makes no operation of the trace
        return jnp.mean((dense_unit(params["used"], batch) - 1) ** 2)

    params = {"used": jnp.ones((4, 4)), "unused": jnp.ones((4, 4))}
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), SHARDED, jaxddp.data_mesh(2))
    state, metrics = trainer.step(trainer.init(params), jnp.ones((2, 4)))
    assert float(metrics["loss"]) == 9
    np.testing.assert_array_equal(trainer.params(state)["unused"], params["unused"])


def test_frozen_integers_are_gathered_with_their_unit():
    unit = jaxddp.layer(lambda one, x: jnp.tanh(x @ one["kernel"][one["order"]]))

    def loss_fn(params, batch):
        return jnp.mean(chain(params, batch, unit) ** 2)

    params = [{"kernel": jnp.eye(4) / 2, "order": jnp.array([3, 1, 2, 0])}] * NUM_LAYERS
    trained = []
    for strategy in (jaxddp.bucketed(), SHARDED):
        mesh = jaxddp.data_mesh(2)
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, mesh, trainable=lambda name: "kernel" in name)
        state, _ = trainer.step(trainer.init(params), jnp.arange(8.0).reshape(2, 4))
        trained.append(trainer.params(state))
    assert_near(*trained, atol=1e-6)  # sums in float32


def test_a_loss_without_units_is_warned_of_once_and_not_on_one_rank():
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    for num_ranks, count in ((1, 0), (2, 1)):
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), SHARDED, jaxddp.data_mesh(num_ranks))
        state = trainer.init({"w": jnp.ones((4, 4))})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for batch in (jnp.ones((2, 4)), jnp.ones((4, 4))):
                trainer.plan(state, batch)
            trainer.evaluate(state, batch)
        assert ["jaxddp.layer" in str(one.message) for one in caught] == [True] * count


def test_the_backward_of_what_nothing_differentiates_is_not_computed():
    """A root at zero would make it 0 times infinity."""
    unit = jaxddp.layer(lambda kernel, x: 0 * (x @ kernel))

    def loss_fn(params, batch):
        def body(x, kernel):
            x = unit(kernel, x)
            return x, jnp.sqrt(jnp.sum(x**2))

        x, norms = jax.lax.scan(body, batch["x"], params["layers"])
        return jnp.mean((batch["x"] @ params["head"] - 1) ** 2) + jnp.mean(x), norms.sum()

    params = {"layers": jnp.ones((3, 8, 8)), "head": jnp.ones((8, 8))}
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), SHARDED, jaxddp.data_mesh(2), has_aux=True)
    _, metrics = trainer.step(trainer.init(params), {"x": jnp.ones((4, 8))})
    assert metrics["aux"] == 0 and jnp.isfinite(metrics["grad_norm"])
