"""What reaches a shard past its unit, or a full copy that is dropped, is lost or wrong: FSDP refuses it."""

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


class Changes(nn.Linear):
    """Changes its weight in its forward."""

    def __init__(self, change):
        super().__init__(4, 4)
        self.change = change

    def forward(self, x):
        if self.change == "data":
            self.weight.data.clamp_(-0.1, 0.1)
        elif self.change == "a row of data":
            self.weight.data[0] = 0.0
        elif self.change == "no_grad":
            with torch.no_grad():
                self.bias.zero_()
        elif self.change == "reads":
            x = x * self.weight.data.abs().max() * (self.weight.clamp(-0.1, 0.1).sum() + self.bias.detach().sum())
        return super().forward(x)


def message_of_a_forward(change, grad, dtype, shard_types=(nn.Linear,)):
    module = nn.Sequential(Changes(change), nn.Embedding(2, 2))
    net = torchref.FSDP(module, compute_dtype=dtype, shard_types=shard_types)
    try:
        with torch.set_grad_enabled(grad):
            loss = net.module[0](torch.ones(3, 4)).sum()
        if grad:
            loss.backward()
            net.finish_gradient_synchronization()
    except RuntimeError as error:
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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("change", ["data", "a row of data", "no_grad"])
def test_a_forward_that_changes_gathered_parameters_is_refused(ranks, change, grad, dtype):
    for message in ranks.run(message_of_a_forward, change, grad, dtype, num_ranks=2):
        assert message.startswith("the forward of Changes changed its parameters in place") and "\n" not in message


def test_a_forward_that_changes_what_is_cast_is_refused(ranks):
    for message in ranks.run(message_of_a_forward, "data", True, torch.bfloat16, (nn.Embedding,), num_ranks=2):
        assert message.startswith("the forward of Changes changed its parameters in place")


def test_a_forward_may_read_data(ranks):
    assert ranks.run(message_of_a_forward, "reads", True, None, num_ranks=2) == ["", ""]
