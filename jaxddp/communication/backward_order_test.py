import jax
import jax.numpy as jnp

from jaxddp.communication.backward_order import finishing_times, matmul_flops
from jaxddp.communication.planned import zeros


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


def test_a_cast_is_ready_when_its_operand_is():
    """Casts of the parameters are transposed after the whole backward, in the order of the tree."""
    params = {f"l{i}": jnp.ones((4, 4)) for i in range(3)}

    def loss(params, x):
        params = {name: weight.astype(jnp.bfloat16) for name, weight in params.items()}
        for weight in params.values():
            x = jnp.tanh(x @ weight)
        return x.sum()

    found, _ = order(loss, params, jnp.ones((2, 4), jnp.bfloat16))
    assert found == ["l2", "l1", "l0"]
    early = lambda a: (cast := a @ a, a @ a, cast.astype(jnp.bfloat16))  # noqa: E731
    assert times_of(early, jnp.ones((2, 2)), cost=matmul_flops) == [16, 32, 16]
    assert times_of(lambda a: jnp.ones(2).astype(jnp.bfloat16), jnp.ones(2), cost=None) == [None]


def test_a_gradient_that_depends_on_nothing_is_constant():
    params = {"used": jnp.ones(3), "unused": jnp.ones(3), "linear": jnp.ones(3)}
    _, times = order(lambda params, x: (params["used"] * x).sum() + params["linear"].sum(), params, jnp.ones(3))
    assert times["unused"] is None
    assert times["linear"] is None
    assert times["used"] is not None


def test_outputs_that_are_zeros_whatever_the_inputs_are():
    def function(x):
        zero = jnp.zeros((2, 3))
        known = (zero, -zero.T, jnp.concatenate([zero, zero]) + 0.0, zero * x.sum(), jax.jit(lambda y: zero @ y)(x))
        return *known, zero + 1, x - x, jnp.exp(zero), jnp.ones(3)

    assert zeros(jax.make_jaxpr(function)(jnp.ones((3, 2)))) == 5 * [True] + 4 * [False]


def times_of(function, *args, cost):
    return finishing_times(jax.make_jaxpr(function)(*args), cost)


def test_time_passes_as_operations_cost():
    a, b, c = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones((4, 5))

    def function(a, b, c):
        first = a @ b
        return first, jnp.tanh(first), first @ c, jnp.ones(2)

    assert times_of(function, a, b, c, cost=matmul_flops) == [2 * 2 * 3 * 4, 48, 48 + 2 * 2 * 4 * 5, None]
    assert times_of(function, a, b, c, cost=lambda equation: 10)[:3] == [10, 20, 30]
    assert times_of(jax.jit(function), a, b, c, cost=matmul_flops) == [48, 48, 128, None]


def flops_of(function, *args):
    return sum(matmul_flops(equation) for equation in jax.make_jaxpr(function)(*args).eqns)


def test_flops_of_matrix_products_whatever_their_dims():
    assert flops_of(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 4))) == 2 * 2 * 3 * 4
    batched = lambda a, b: jnp.einsum("bijk,bjkm->bmi", a, b)  # noqa: E731
    assert flops_of(batched, jnp.ones((7, 2, 3, 5)), jnp.ones((7, 3, 5, 4))) == 2 * 7 * 2 * 3 * 5 * 4
    assert flops_of(jnp.dot, jnp.ones(6), jnp.ones(6)) == 12
    assert flops_of(lambda a: jnp.tanh(a) + a.sum(), jnp.ones(6)) == 0


def test_flops_of_what_is_wrapped_or_repeated():
    weights = jnp.ones((5, 3, 3))

    def layer(x, w):
        return jax.jit(jax.checkpoint(jnp.matmul))(x, w), None

    def scanned(x):
        return jax.lax.scan(layer, x, weights)[0]

    assert flops_of(layer, jnp.ones((2, 3)), weights[0]) == 36
    assert flops_of(scanned, jnp.ones((2, 3))) == 5 * 36
    twice = lambda x: jax.lax.scan(lambda x, _: (scanned(x), None), x, None, length=2)[0]  # noqa: E731
    assert flops_of(twice, jnp.ones((2, 3))) == 2 * 5 * 36
    # How often this one runs is not known: once is the least.
    unknown = lambda x: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ weights[0], x)  # noqa: E731
    assert flops_of(unknown, jnp.ones((2, 3))) == 36


def test_a_loop_costs_all_its_rounds_before_any_result():
    weights = jnp.ones((5, 3, 3))

    def function(x):
        looped, each = jax.lax.scan(lambda x, w: (x @ w, x.sum()), x, weights)
        return looped, each, looped @ weights[0]

    assert times_of(function, jnp.ones((2, 3)), cost=matmul_flops) == [180, 180, 216]
