"""Products of a backward that write float32 gradients of bfloat16 weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp import ddp
from jaxddp.communication import reduction
from jaxddp.training import wide_products
from jaxddp.training.wide_products import with_wide_products

SHAPES = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}


def masters():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype("float32") / 8 for name, shape in SHAPES.items()}


X = np.random.default_rng(1).normal(size=(16, 32)).astype("float32")


def loss(params, x=X):
    weights = {name: weight.astype(jnp.bfloat16) for name, weight in params.items()}
    x = x.astype(jnp.bfloat16)
    hidden = jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])
    return jnp.mean((hidden @ weights["down"]).astype(jnp.float32) ** 2)


def grads_of(params):
    return jax.grad(loss)(params), ()


def written(function, params):
    """The dtypes in which gradients of the shape of a parameter are written, and the number of barriers."""
    equations = jax.make_jaxpr(lambda params: with_wide_products(function, params))(params).jaxpr.eqns
    shapes = {tuple(sorted(shape)) for shape in SHAPES.values()}
    products = [one.outvars[0].aval for one in equations if one.primitive.name == "dot_general"]
    dtypes = [str(aval.dtype) for aval in products if tuple(sorted(aval.shape)) in shapes]
    return dtypes, sum(one.primitive.name == "optimization_barrier" for one in equations)


def test_gradients_are_not_rounded():
    """``d sum(x @ w) / dw = x^T 1``, of which float32 rounds only the sums, and bfloat16 each element to 8 bits."""

    def last_grad(weight):
        return jax.grad(lambda weight: jnp.sum((x @ weight.astype(jnp.bfloat16)).astype(jnp.float32)))(weight), ()

    x = jnp.asarray(X, jnp.bfloat16)
    exact = np.broadcast_to(np.asarray(x, np.float64).sum(axis=0)[:, None], SHAPES["gate"])
    weight, largest = masters()["gate"], np.abs(exact).max()
    assert np.abs(with_wide_products(last_grad, weight)[0] - exact).max() < 1e-6 * largest
    assert np.abs(last_grad(weight)[0] - exact).max() > 1e-3 * largest


def test_the_whole_gradient_is_that_of_the_function():
    params = masters()
    (wide, _), (narrow, _) = with_wide_products(grads_of, params), grads_of(params)
    for name, grad in narrow.items():
        assert wide[name].dtype == grad.dtype == jnp.float32
        # One rounding to bfloat16, 2^-9, of each element.
        np.testing.assert_allclose(wide[name].astype(jnp.bfloat16).astype("float32"), grad, rtol=2**-8)


@pytest.mark.parametrize(("fills_gpu", "dtypes", "barriers"), [(1, ["float32"] * 3, 1), (2**21, ["bfloat16"] * 2, 0)])
def test_products_of_one_operand_are_kept_apart_or_left(monkeypatch, fills_gpu, dtypes, barriers):
    """Gate's and up's gradients are products of x; down's is of an operand of its own, and is written in float32."""
    monkeypatch.setattr(wide_products, "_FILLS_GPU", fills_gpu)
    found, num_barriers = written(grads_of, masters())
    assert sorted(found) == sorted(["float32", *dtypes[-2:]]) and num_barriers == barriers


def test_what_is_used_rounded_stays_rounded():
    def norms_of_rounded(params):
        narrow = jax.grad(loss)({name: weight.astype(jnp.bfloat16) for name, weight in params.items()})
        return jax.tree.map(lambda grad: grad.astype(jnp.float32), narrow), jax.tree.map(jnp.sum, narrow)

    dtypes, barriers = written(norms_of_rounded, masters())
    assert dtypes == ["bfloat16"] * 3 and barriers == 0


def test_what_is_no_gradient_stays_rounded():
    def with_outputs(params):
        return {}, (jnp.asarray(X, jnp.bfloat16) @ params["gate"].astype(jnp.bfloat16)).astype(jnp.float32)

    outputs = with_wide_products(with_outputs, masters())[1]
    np.testing.assert_array_equal(outputs, outputs.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_product_with_a_constant():
    """Two scalars, one of which is a literal of the trace."""

    def scaled(params):
        def product(scale):
            return jax.lax.dot_general(scale.astype(jnp.bfloat16), jnp.asarray(2, jnp.bfloat16), (((), ()), ((), ())))

        return jax.grad(lambda scale: product(scale).astype(jnp.float32))(params), ()

    assert with_wide_products(scaled, jnp.float32(3)) == (2, ())


def test_float32_functions_and_effects_are_called_once(capfd):
    def function(params, dtype):
        calls.append(dtype)
        jax.debug.print("loss of {}", jnp.zeros((), dtype))
        return jax.grad(lambda params: jnp.mean((X.astype(dtype) @ params["gate"].astype(dtype)) ** 2))(params), ()

    calls = []
    for dtype in (jnp.float32, jnp.bfloat16):
        grads, _ = with_wide_products(lambda params, dtype=dtype: function(params, dtype), masters())
        jax.block_until_ready(grads)
        assert not grads["up"].any() and grads["gate"].all()
    jax.effects_barrier()
    assert calls == [jnp.float32, jnp.bfloat16] and capfd.readouterr().out.count("loss of") == 2


def test_the_step_takes_them_where_it_sends_gradients_uncopied(monkeypatch):
    def loss_fn(params, batch):
        return jnp.mean((batch["x"].astype(jnp.bfloat16) @ params["gate"]).astype(jnp.float32) ** 2)

    for module in (reduction, ddp):
        monkeypatch.setattr(module, "joins_arrays", lambda: True)  # as on GPUs
    for strategy, num_microbatches, is_wide in (
        (jaxddp.bucketed(), 1, True),
        (jaxddp.overlapped(), 1, True),
        (jaxddp.flat(), 1, False),  # packs
        (jaxddp.zero1(), 1, False),  # packs
        (jaxddp.bucketed(), 2, False),  # casts as it adds
    ):
        options = {"compute_dtype": jnp.bfloat16, "num_microbatches": num_microbatches}
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(2), **options)
        state, batch = trainer.init({"gate": masters()["gate"]}), {"x": X}
        function, args, _ = trainer.programs(state).step_function(state, batch)
        assert ("preferred_element_type=float32" in str(jax.make_jaxpr(function)(*args))) == is_wide
