import pytest
import torch

from torchref.models import build


def test_the_seed_decides_the_parameters_and_leaves_the_global_generator():
    state = torch.random.get_rng_state()
    first, again, other = (build("tiny", seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="^unknown model 'foo': one of tiny, byte, "):
        build("foo")
