"""What becomes trainable after wrapping is in no plan: every wrapper refuses it when it is to synchronise."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref

WRAPPERS = {
    "naive": (torchref.NaiveDDP, {}),
    "flat": (torchref.FlatDDP, {}),
    "overlapped": (torchref.OverlappedDDP, {}),
    "bucketed": (torchref.BucketedDDP, {}),
    "zero1": (torchref.ZeRO1, {"optimizer_cls": torch.optim.SGD, "lr": 0.1}),
    "zero2": (torchref.ZeRO2, {"optimizer_cls": torch.optim.SGD, "lr": 0.1}),
    "zero3": (torchref.FSDP, {}),
}
wrappers = pytest.mark.parametrize("name", WRAPPERS)


def wrap(name, module):
    cls, options = WRAPPERS[name]
    return cls(module, **options)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


# On the ranks


def message_of(name, change):
    module = model()
    module[2].requires_grad_(False)
    net = wrap(name, module)
    {"unfreeze": unfreeze, "append": append}[change](module)
    try:
        net(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
        net.finish_gradient_synchronization()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def unfreeze(module):
    module[2].requires_grad_(True)


def append(module):
    module.append(nn.Linear(2, 2))


# Tests


@pytest.mark.parametrize(("change", "parameter"), [("unfreeze", "2.weight"), ("append", "3.weight")])
@wrappers
def test_it_is_refused(ranks, name, change, parameter):
    for message in ranks.run(message_of, name, change, num_ranks=2):
        assert f"parameter {parameter!r} became trainable after wrapping: wrap the module anew" in message
