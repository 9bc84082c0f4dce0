import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxddp.comparison_test import mostly_full, refusal
from jaxddp.models import SIZES, TransformerConfig, abstract, build, cross_entropy
from jaxddp.models.transformer import Attention, Transformer, rotary_tables

NUM_PARAMS = {
    "tiny": 7_248,
    "byte": 4_327_680,
    "byte_shallow": 2_229_504,
    "lm_9m": 9_316_608,
    "seed_xl": 171_098_880,
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7b": 3_406_809_600,
}


def rotate_by_complex_numbers(x, theta=10_000.0):
    """RoPE, independently: features i and i + half are one complex number, turned by e^(i position frequency)."""
    half = x.shape[-1] // 2
    turned = np.empty_like(x)
    for position in range(x.shape[-2]):
        for i in range(half):
            angle = position / theta ** (2 * i / (2 * half))
            number = (x[..., position, i] + 1j * x[..., position, i + half]) * np.exp(1j * angle)
            turned[..., position, i], turned[..., position, i + half] = number.real, number.imag
    return turned


def attention_by_loops(x, num_heads, query, key, value, output):
    """Causal attention, independently: one query position at a time over the keys it may see; kernels are [in, out]."""
    batch, length, width = x.shape
    size = width // num_heads
    mixed = np.zeros_like(x)
    for b in range(batch):
        for head in range(num_heads):
            part = slice(head * size, (head + 1) * size)
            q = rotate_by_complex_numbers((x[b] @ query)[:, part])
            k = rotate_by_complex_numbers((x[b] @ key)[:, part])
            v = (x[b] @ value)[:, part]
            for t in range(length):
                scores = np.exp(k[: t + 1] @ q[t] / np.sqrt(size))
                mixed[b, t, part] = scores @ v[: t + 1] / scores.sum()
    return mixed @ output


# Tracing the initialisation of the others takes longest; their formula is the same.
QUICK = ("tiny", "byte", "byte_shallow", "lm_9m", "seed_xl", "small")


@pytest.mark.parametrize("name", mostly_full(QUICK, SIZES))
def test_sizes_have_exactly_the_known_number_of_parameters(name):
    config = SIZES[name]
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in leaves) == config.num_params == NUM_PARAMS[name]
    assert len(leaves) == 9 * config.num_layers + 3


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_rotary_tables_are_the_float64_ones_rounded_once(dtype):
    for table, exact in zip(rotary_tables(128, 32, dtype), rotary_tables(128, 32, np.float64), strict=True):
        assert table.dtype == dtype
        assert np.array_equal(table, exact.astype(dtype))


def test_attention_equals_loops_in_numpy_in_float64():
    config = TransformerConfig(vocab=8, context=16, width=12, num_layers=1, num_heads=3, hidden=8)
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        graph, state = nnx.split(Attention(config, rngs=nnx.Rngs(0)))
        state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 3), state)
        attention = nnx.merge(graph, state)
        kernels = [
            np.asarray(part.kernel[...]) for part in (attention.query, attention.key, attention.value, attention.output)
        ]
        x = rng.normal(size=(2, 10, 12))
        got = attention(jnp.asarray(x), rotary_tables(10, 4, np.float64))
        # Rounding of sums of 12 products in float64, on values up to about 10.
        np.testing.assert_allclose(got, attention_by_loops(x, 3, *kernels), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_parameters_decide_the_dtype_and_float64_has_no_float32_inside(dtype):
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(SIZES["tiny"], rngs=nnx.Rngs(0))))
    with jax.enable_x64(True):
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), state)
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        program = jax.make_jaxpr(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, tokens)
    assert program.out_avals[0].dtype == dtype
    assert dtype != jnp.float64 or "f32" not in str(program)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width (=0) must be a positive integer"),
        ({"num_heads": 3}, "width (=16) must be divisible by num_heads (=3)"),
        ({"num_heads": 16}, "width / num_heads (=1) must be even: RoPE turns pairs"),
    ],
)
def test_config_refuses_sizes_that_cannot_be(change, message):
    sizes = {"vocab": 64, "context": 16, "width": 16, "num_layers": 2, "num_heads": 2, "hidden": 32} | change
    assert message in refusal(TransformerConfig, **sizes)


def test_cross_entropy_equals_numpy_and_is_stable():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        logits, targets = rng.normal(size=(2, 5, 7)) * 3, rng.integers(7, size=(2, 5))
        picked = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        expected = (np.log(np.exp(logits).sum(axis=-1)) - picked).mean()
        for shift in (0.0, 1e4, -1e4):
            got = cross_entropy(jnp.asarray(logits + shift), jnp.asarray(targets))
            # Adding 1e4 rounds a float64 logit by 1e-12.
            assert abs(float(got) - expected) < (1e-11 if shift else 1e-14)


@pytest.mark.parametrize("make", [build, abstract])
def test_an_unknown_model_is_refused_with_the_known_ones(make):
    names = "tiny, byte, byte_shallow, lm_9m, seed_xl, small, medium, large, xl, 2.7b"
    assert refusal(make, "foo") == f"unknown model 'foo': one of {names}"
    assert refusal(make, 3).startswith("unknown model 3: one of tiny, ")


def test_the_functional_transformer_refuses_a_sequence_longer_than_the_context():
    loss, params = build("tiny")
    tokens = jnp.zeros((3, 17), jnp.int32)
    found = refusal(loss, params, {"tokens": tokens, "targets": tokens})
    assert found == "sequence length (=17) must be at most context (=16)"
