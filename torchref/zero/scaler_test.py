"""Steps past the wrapper, such as a ``GradScaler``'s, and buffers that a forward changes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchref.late_parameters_test import model, wrap, wrappers

# On the ranks


def step_of_the_optimizer_alone(name):
    net = wrap(name, model())
    net(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
    net.finish_gradient_synchronization()
    try:
        net.optimizer.step()
    except RuntimeError as error:
        return str(error)
    return {key: parameter.tolist() for key, parameter in net.module.named_parameters()}


def step_of_a_scheduled_optimizer(name):
    net = wrap(name, model())
    schedule = torch.optim.lr_scheduler.StepLR(net.optimizer, 1)
    net(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
    net.finish_gradient_synchronization()
    net.step()
    schedule.step()
    return {key: parameter.tolist() for key, parameter in net.module.named_parameters()}


def buffers_after_two_steps(name):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net = wrap(name, module)
    tx = torch.optim.SGD(net.parameters(), lr=0.1) if name in PLAIN else net
    for step in range(2):
        net.zero_grad()
        x = torch.linspace(0, 1, 12).reshape(4, 3) * (dist.get_rank() + 1) + step
        net(x).square().sum().backward()
        net.finish_gradient_synchronization()
        tx.step()
    return {key: buffer.tolist() for key, buffer in module.named_buffers()}


PLAIN = ("naive", "flat", "overlapped", "bucketed", "zero3")

# Tests


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_step_past_the_wrapper_is_refused(ranks, name):
    for message in ranks.run(step_of_the_optimizer_alone, name, num_ranks=2):
        assert "call step() of the wrapper" in message


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_schedule_drives_the_optimizer(ranks, name):
    first, second = ranks.run(step_of_a_scheduled_optimizer, name, num_ranks=2)
    assert first == second


@wrappers
def test_buffers_stay_equal(ranks, name):
    first, second = ranks.run(buffers_after_two_steps, name, num_ranks=2)
    assert first == second
