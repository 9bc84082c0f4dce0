"""What parity with jaxddp's models does not hold: sizes, tables, refusals."""

import pytest
import torch

from torchref.models import SIZES, Transformer, rotary_tables


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
