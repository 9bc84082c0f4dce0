import jax
import jax.numpy as jnp

from jaxddp.communication.traces import VARIES, ZERO, Value, expressions, finishing_times, follow


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


def test_the_last_layer_is_ready_first():
    for loss, params, x in (
        (layers, MATRICES, jnp.ones((2, 4))),
        (layers, MATRICES, jnp.ones((2, 4), jnp.bfloat16)),  # casts are transposed after the whole backward
        (wrapped, {name: jnp.ones(4) for name in "abcd"}, jnp.ones(4)),  # counts in line
        (loop, {"a": jnp.ones(4), "b": jnp.ones((3, 4)), "c": jnp.ones(4)}, jnp.ones(4)),  # finishes as a whole
    ):
        assert order(loss, params, x)[0] == [*reversed(params)]


def test_a_cast_is_ready_when_its_operand_is():
    early = lambda a: (cast := a @ a, a @ a, cast.astype(jnp.bfloat16))  # noqa: E731
    assert finishing_times(jax.make_jaxpr(early)(jnp.ones((2, 2)))) == [1, 2, 1]
    constant = lambda a: jnp.ones(2).astype(jnp.bfloat16)  # noqa: E731
    assert finishing_times(jax.make_jaxpr(constant)(jnp.ones(2))) == [None]


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


def test_expressions_tell_outputs_apart_by_what_they_are_computed_from():
    def of(one, other, factor=2.0):
        held = jnp.full(3, one), jnp.full(3, other)
        program = jax.make_jaxpr(lambda x: (jax.jit(jnp.sin)(held[0]) * factor, held[1] * x))(1.0)
        return [value.number for value in expressions(program, [Value(0)])]

    assert of(1.0, 1.0)[0] == of(1.0, 2.0)[0] != of(2.0, 1.0)[0] != of(2.0, 1.0, 3.0)[0]
    assert of(1.0, 1.0)[1] != of(1.0, 2.0)[1]
