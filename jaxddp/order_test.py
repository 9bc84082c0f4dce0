import jax
import jax.numpy as jnp

from jaxddp.order import finishing_times


def order(loss, params, *args):
    traced, shapes = jax.make_jaxpr(jax.grad(loss), return_shape=True)(params, *args)
    times = dict(zip(shapes, finishing_times(traced), strict=True))
    return [name for name, time in sorted(times.items(), key=lambda item: (item[1] is None, item[1] or 0))], times


def test_the_last_layer_is_ready_first_whatever_the_names_sort_like():
    params = {f"l{i}": jnp.ones((4, 4)) for i in range(12)}

    def loss(params, x):
        for i in range(12):
            x = jnp.tanh(x @ params[f"l{i}"])
        return x.sum()

    found, _ = order(loss, params, jnp.ones((2, 4)))
    assert found == [f"l{i}" for i in reversed(range(12))]
    assert list(params) != sorted(params)  # l10 sorts before l2: the tree's own order would not do


def test_wrapped_programs_count_in_line():
    params = {"a": jnp.ones(4), "b": jnp.ones(4), "c": jnp.ones(4), "d": jnp.ones(4)}

    @jax.jit
    @jax.checkpoint
    def two_layers(a, b, x):
        return jnp.sin(jnp.sin(x * a) * b)

    def loss(params, x):
        return two_layers(params["c"], params["d"], two_layers(params["a"], params["b"], x)).sum()

    found, _ = order(loss, params, jnp.ones(4))
    assert found == ["d", "c", "b", "a"]


def test_a_loop_finishes_as_a_whole():
    params = {"before": jnp.ones(4), "loop": jnp.ones((3, 4)), "after": jnp.ones(4)}

    def loss(params, x):
        x, _ = jax.lax.scan(lambda carry, w: (jnp.sin(carry * w), None), x * params["before"], params["loop"])
        return (x * params["after"]).sum()

    found, _ = order(loss, params, jnp.ones(4))
    assert found == ["after", "loop", "before"]


def test_a_gradient_that_depends_on_nothing_is_constant():
    params = {"used": jnp.ones(3), "unused": jnp.ones(3), "linear": jnp.ones(3)}
    _, times = order(lambda params, x: (params["used"] * x).sum() + params["linear"].sum(), params, jnp.ones(3))
    assert times["unused"] is None
    assert times["linear"] is None
    assert times["used"] is not None
