import jax
import jax.numpy as jnp
import pytest

from jaxddp.communication.traces import VARIES, ZERO, checksum, finishing_times, follow, matmul_flops


def order(loss, params, *args):
    traced, shapes = jax.make_jaxpr(jax.grad(loss), return_shape=True)(params, *args)
    times = dict(zip(shapes, finishing_times(traced), strict=True))
    return [name for name, time in sorted(times.items(), key=lambda item: (item[1] is None, item[1] or 0))], times


def layers(params, x):
    params = {name: weight.astype(x.dtype) for name, weight in params.items()}
    for index in range(len(params)):
        x = jnp.tanh(x @ params[f"l{index}"])
    return x.sum()


def wrapped(params, x):
    @jax.jit
    @jax.checkpoint
    def two_layers(a, b, x):
        return jnp.sin(jnp.sin(x * a) * b)

    return two_layers(params["c"], params["d"], two_layers(params["a"], params["b"], x)).sum()


def loop(params, x):
    x, _ = jax.lax.scan(lambda carry, w: (jnp.sin(carry * w), None), x * params["a"], params["b"])
    return (x * params["c"]).sum()


MATRICES = {f"l{i}": jnp.ones((4, 4)) for i in range(12)}  # l10 sorts before l2: the tree's own order would not do


@pytest.mark.parametrize(
    ("loss", "params", "x"),
    [
        (layers, MATRICES, jnp.ones((2, 4))),
        (layers, MATRICES, jnp.ones((2, 4), jnp.bfloat16)),  # casts are transposed after the whole backward
        (wrapped, {name: jnp.ones(4) for name in "abcd"}, jnp.ones(4)),  # counts in line
        (loop, {"a": jnp.ones(4), "b": jnp.ones((3, 4)), "c": jnp.ones(4)}, jnp.ones(4)),  # finishes as a whole
    ],
)
def test_the_last_layer_is_ready_first(loss, params, x):
    assert order(loss, params, x)[0] == [*reversed(params)]


def test_a_cast_is_ready_when_its_operand_is():
    early = lambda a: (cast := a @ a, a @ a, cast.astype(jnp.bfloat16))  # noqa: E731
    assert times_of(early, jnp.ones((2, 2)), cost=matmul_flops) == [16, 32, 16]
    assert times_of(lambda a: jnp.ones(2).astype(jnp.bfloat16), jnp.ones(2), cost=None) == [None]


def test_a_gradient_that_depends_on_nothing_is_constant():
    params = {"used": jnp.ones(3), "unused": jnp.ones(3), "linear": jnp.ones(3)}
    _, times = order(lambda params, x: (params["used"] * x).sum() + params["linear"].sum(), params, jnp.ones(3))
    assert {name for name, time in times.items() if time is None} == {"unused", "linear"}


def test_outputs_that_are_zeros_whatever_the_inputs_are():
    def function(x):
        zero = jnp.zeros((2, 3))
        known = (zero, -zero.T, jnp.concatenate([zero, zero]) + 0.0, zero * x.sum(), jax.jit(lambda y: zero @ y)(x))
        return *known, zero + 1, x - x, jnp.exp(zero), jnp.ones(3)

    found = follow(jax.make_jaxpr(function)(jnp.ones((3, 2))), [VARIES], lambda *_: None)
    assert [known == ZERO for known in found] == 5 * [True] + 4 * [False]


def test_a_checksum_tells_programs_apart_by_what_its_outputs_are_computed_from():
    def of(one, other, factor=2.0, is_wanted=(True, False)):
        held = jnp.full(3, one), jnp.full(3, other)
        return checksum(jax.make_jaxpr(lambda x: (jax.jit(jnp.sin)(held[0]) * factor, held[1] * x))(1.0), is_wanted)

    assert of(1.0, 1.0) == of(1.0, 2.0) != of(2.0, 1.0) != of(2.0, 1.0, 3.0)
    assert of(1.0, 1.0, is_wanted=(True, True)) != of(1.0, 2.0, is_wanted=(True, True))


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
