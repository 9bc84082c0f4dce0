import numpy as np
import pytest
import torch

from torchref.models import build, cross_entropy


def test_cross_entropy_equals_numpy_and_is_stable():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 5, 7)) * 3, rng.integers(7, size=(2, 5))
    picked = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = (np.log(np.exp(logits).sum(axis=-1)) - picked).mean()
    for shift in (0.0, 1e4, -1e4):
        got = cross_entropy(torch.from_numpy(logits + shift), torch.from_numpy(targets))
        # Adding 1e4 rounds a float64 logit by 1e-12.
        assert abs(got.item() - expected) < (1e-11 if shift else 1e-14)


def test_the_seed_decides_the_parameters_and_leaves_the_global_generator():
    state = torch.random.get_rng_state()
    first, again, other = (build("tiny", seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="^unknown model 'foo': one of toy, toy_tied, .*, tiny, byte, "):
        build("foo")
