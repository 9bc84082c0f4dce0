"""``sync_gradients`` and ``shard_optimizer`` in a user's own ``shard_map``: what they cannot do right, they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxddp

NUM_RANKS = 4


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def inputs():
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 3)).astype("f4"), "y": rng.normal(size=(8, 2)).astype("f4")}
    return {"w": jnp.asarray(rng.normal(size=(3, 2)), "f4")}, batch


def rank_batch(batch):
    return jax.tree.map(lambda leaf: leaf[: len(leaf) // NUM_RANKS], batch)


def mark(params):
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)


def on_ranks(function, **options):
    specs = (P(), P("data"))
    mesh = jaxddp.data_mesh(NUM_RANKS)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), **options))


UNUSED = {"unused": jnp.ones(5), "empty": jnp.ones(0)}


def test_a_parameter_may_be_unused_or_empty():
    strategy, (params, batch) = jaxddp.bucketed(), inputs()
    params |= UNUSED
    plan = jaxddp.plan_gradients(strategy, jax.grad(loss_fn), params, rank_batch(batch))

    def mean_gradients(params, batch):
        return jaxddp.sync_gradients(jax.grad(loss_fn)(mark(params), batch), plan, "data")

    step = jax.jit(
        jax.shard_map(mean_gradients, mesh=jaxddp.data_mesh(NUM_RANKS), in_specs=(P(), P("data")), out_specs=P()),
        compiler_options=jaxddp.compile_options(strategy, "cpu"),
    )
    found = step(params, batch)
    expected = jax.grad(loss_fn)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    compiled = jaxddp.gradient_collectives(step.lower(params, batch).compile())
    assert compiled == [("all-reduce", 24)]  # none of the zeros


def test_a_sharded_optimizer_takes_unused_parameters():
    params, batch = inputs()
    params |= UNUSED
    optimizer = jaxddp.shard_optimizer(optax.sgd(1.0), "data")

    def updates(params, batch):
        return optimizer.update(jax.grad(loss_fn)(mark(params), batch), optimizer.init(params), params)[0]

    found, expected = on_ranks(updates)(params, batch), jax.grad(loss_fn)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, rtol=1e-5), found, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_plan_may_meet_gradients_that_were_constant_when_it_was_made(check_vma):
    def with_bias(params, batch, uses_bias):
        return loss_fn(params, batch) + uses_bias * jnp.mean(batch["x"]) * jnp.sum(params["b"])

    params, batch = inputs()
    params["b"] = jnp.ones(3)
    grad_fn = jax.grad(with_bias)

    def without_bias(params, batch):
        return grad_fn(params, batch, 0) | {"b": jnp.zeros(3)}

    plan = jaxddp.plan_gradients(jaxddp.bucketed(), without_bias, params, rank_batch(batch))
    assert plan.constants == ("b",)

    def mean_gradients(params, batch):
        return jaxddp.sync_gradients(grad_fn(mark(params), batch, 1), plan, "data")

    found = on_ranks(mean_gradients, check_vma=check_vma)(params, batch)
    expected = grad_fn(params, batch, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    assert len({shard.data.tobytes() for shard in found["b"].addressable_shards}) == 1


def on_two_axes(function):
    """Maps over 4 x 2 ranks: examples are split over the first axis, columns of the weights over the second."""
    mesh = jax.make_mesh((NUM_RANKS, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = (P(None, "model"), P("data")), P(None, "model")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs[0], out_specs=specs[1]))


def square(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.parametrize("kind", ["sync_gradients", "shard_optimizer"])
def test_a_gradient_that_varies_over_another_axis_only_is_refused(kind):
    params = {"w": jnp.arange(6.0).reshape(3, 2)}
    x = jnp.arange(24.0).reshape(8, 3) / 10
    plan = jaxddp.plan_gradients(jaxddp.bucketed(), jax.grad(square), {"w": params["w"][:, :1]}, x[:2])
    optimizer = jaxddp.shard_optimizer(optax.sgd(1.0), "data")

    def means(local, params, x):
        grads = jax.grad(square)(local, x)
        if kind == "sync_gradients":
            return jaxddp.sync_gradients(grads, plan, "data")
        return jax.tree.map(jnp.negative, optimizer.update(grads, optimizer.init(params), params)[0])

    with pytest.raises(ValueError, match=r"gradient of 'w' does not vary over 'data'.*jax\.lax\.pcast"):
        on_two_axes(lambda params, x: means(params, params, x))(params, x)
    found = on_two_axes(lambda params, x: means(mark(params), params, x))(params, x)
    np.testing.assert_allclose(found["w"], 2 * jax.grad(square)(params, x)["w"], rtol=1e-5)  # a mean of half as many


def test_an_axis_that_is_not_bound_is_one_line():
    params, batch = inputs()
    plan = jaxddp.plan_gradients(jaxddp.bucketed(), jax.grad(loss_fn), params, rank_batch(batch))
    with pytest.raises(ValueError, match=r"^axis \(='data'\) must be bound: call this inside jax\.shard_map over it$"):
        jaxddp.sync_gradients(params, plan, "data")

    def noisy(params, batch):
        return loss_fn(params, batch) * jax.lax.axis_index("data")

    with pytest.raises(ValueError, match=r"^grad_fn must not use a mesh axis here, where none is bound: call[^\n]*$"):
        jaxddp.plan_gradients(jaxddp.bucketed(), jax.grad(noisy), params, rank_batch(batch))
    with pytest.raises(NameError, match="misspelt"):
        jaxddp.plan_gradients(jaxddp.bucketed(), jax.grad(lambda params: misspelt), params)  # noqa: F821


def test_a_leaf_that_was_constant_in_the_plan_is_refused_too_where_autodiff_has_summed_it():
    def with_bias(params, batch, uses_bias):
        return loss_fn(params, batch) + uses_bias * jnp.mean(batch["x"]) * jnp.sum(params["b"])

    params, batch = inputs()
    params["b"] = jnp.ones(3)
    grad_fn = jax.grad(with_bias)
    plan = jaxddp.plan_gradients(
        jaxddp.bucketed(), lambda *args: grad_fn(*args, 0) | {"b": jnp.zeros(3)}, params, rank_batch(batch)
    )

    def mean_gradients(params, batch):
        local = mark({"w": params["w"]}) | {"b": params["b"]}
        return jaxddp.sync_gradients(grad_fn(local, batch, 1), plan, "data")

    with pytest.raises(ValueError, match=r"gradient of 'b' does not vary over 'data'"):
        on_ranks(mean_gradients)(params, batch)
