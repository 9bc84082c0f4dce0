"""What parity with jaxddp's models does not hold: tables and seeds."""

import pytest
import torch

from torchref.models import SIZES, Transformer, build
from torchref.models.transformer import rotary_tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables_are_the_float64_ones_rounded_once(dtype):
    for table, exact in zip(rotary_tables(128, 32, dtype), rotary_tables(128, 32, torch.float64), strict=True):
        assert table.dtype == dtype
        assert torch.equal(table, exact.to(dtype))


def test_tables_made_in_inference_mode_serve_in_training():
    rotary_tables.cache_clear()
    model, tokens = Transformer(SIZES["tiny"]), torch.zeros(2, 8, dtype=torch.int64)
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
    assert rotary_tables.cache_info().misses == 1


def test_the_seed_decides_the_parameters_and_leaves_the_global_generator():
    state = torch.random.get_rng_state()
    first, again, other = (build("tiny", seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
