import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxddp.comparison_test import refusal
from jaxddp.models import abstract, build, cross_entropy


def tokens_batch(seed=0, vocab=64, length=16):
    tokens, targets = np.random.default_rng(seed).integers(vocab, size=(2, 3, length)).astype(np.int32)
    return {"tokens": jnp.asarray(tokens), "targets": jnp.asarray(targets)}


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


def test_seed_decides_the_parameters():
    first, again, other = (build("tiny", seed)[1] for seed in (0, 0, 1))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, first, again))
    assert not jnp.array_equal(first["head"]["kernel"], other["head"]["kernel"])


@pytest.mark.parametrize("make", [build, abstract])
def test_an_unknown_model_is_refused_with_the_known_ones(make):
    names = "tiny, byte, byte_shallow, lm_9m, seed_xl, small, medium, large, xl, 2.7b"
    assert refusal(make, "foo") == f"unknown model 'foo': one of {names}"
    assert refusal(make, 3).startswith("unknown model 3: one of tiny, ")


def test_the_functional_transformer_refuses_a_sequence_longer_than_the_context():
    loss, params = build("tiny")
    found = refusal(loss, params, tokens_batch(length=17))
    assert found == "sequence length (=17) must be at most context (=16)"
