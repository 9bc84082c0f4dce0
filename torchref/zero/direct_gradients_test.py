"""A gradient that reaches a shard past its unit is of a shard where the whole was meant: FSDP refuses it."""

import pytest
import torch
from torch import nn

import torchref


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


class OfAList(nn.Module):
    """Uses the parameters of a ``ParameterList``, whose forward is never called."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x * self.scales[0].sum() * self.scales[1].sum())


# On the ranks


def message_of(kind):
    if kind == "list":
        net = torchref.FSDP(OfAList(), shard_types=(nn.Linear, nn.ParameterList))
    else:
        net = torchref.FSDP(model())
    read = []
    if kind == "hook":
        net.module[0].register_forward_hook(lambda module, args, out: read.append(module.weight.sum()))
    try:
        loss = net(torch.ones(3, 4)).sum()
        if kind == "penalty":
            loss = loss + sum((parameter**2).sum() for parameter in net.parameters())
        elif kind == "hook":
            loss = loss + read[0]
        loss.backward()
        net.finish_gradient_synchronization()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def penalty_of_whole_parameters():
    """A penalty on what stays whole is the parameters' own, and right."""
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    net = torchref.FSDP(module)
    (net(torch.ones(3, 4)).sum() + (module[1].weight ** 2).sum()).backward()
    net.finish_gradient_synchronization()
    return module[1].weight.grad


def hooks_set_before_wrapping(kind):
    module = model()
    if kind == "tensor":
        module[0].weight.register_hook(lambda grad: grad * 2)
    else:
        module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    try:
        torchref.FSDP(module)
    except ValueError as error:
        return str(error)
    return ""


# Tests


@pytest.mark.parametrize("kind", ["penalty", "hook", "list"])
def test_it_is_refused(ranks, kind):
    for message in ranks.run(message_of, kind, num_ranks=2):
        assert "a gradient reached the shard of" in message
        assert "within its module's forward" in message


def test_what_stays_whole_may_be_used_anywhere(ranks):
    for grad in ranks.run(penalty_of_whole_parameters, num_ranks=2):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("kind", ["tensor", "accumulate"])
def test_hooks_that_sharding_would_lose_are_refused(ranks, kind):
    for message in ranks.run(hooks_set_before_wrapping, kind, num_ranks=2):
        assert "parameter '0.weight' has hooks" in message
        assert "its shard would lose" in message
