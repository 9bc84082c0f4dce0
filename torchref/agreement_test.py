"""Ranks whose modules differ when they are wrapped: refused in one line on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchref.late_parameters_test import model, wrap, wrappers

CHANGES = ["layer", "shape", "dtype", "requires_grad", "order", "buffer"]


# On the ranks


def message_of(name, change):
    module = model()
    if dist.get_rank() == 1:
        if change == "layer":
            module.append(nn.Linear(2, 2))
        elif change == "shape":
            module[2] = nn.Linear(4, 3)
        elif change == "dtype":
            module[2].to(torch.float64)
        elif change == "requires_grad":
            module[2].requires_grad_(False)
        elif change == "order":  # of the registration
            module[0]._parameters = dict(reversed(module[0]._parameters.items()))
        else:
            module.register_buffer("table", torch.ones(3))
    try:
        wrap(name, module)
    except ValueError as error:
        return str(error)
    return ""


# Tests


@pytest.mark.parametrize("change", CHANGES)
@wrappers
def test_modules_that_differ_are_refused(ranks, name, change):
    for message in ranks.run(message_of, name, change, num_ranks=2):
        assert "must be the same on every rank" in message
        assert "\n" not in message
