"""Buffers that a forward changes: rank 0's on every rank after each synchronisation, as DistributedDataParallel's."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchref
from torchref.late_parameters_test import WRAPPERS, wrap, wrappers
from torchref.passes_test import optimizer_of


class Norm(nn.Module):
    """Running statistics without a counter, which raise no version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class Counts(nn.Module):
    """Counts the rows above a bound, which one rank alone has; the count scales the output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_large", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.num_large += (x.max() > 3).long()
        return x * (1 + 0.1 * self.num_large)


class Replaced(nn.Module):
    """A moving average that each forward assigns anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x - self.average


class Grows(nn.Module):
    """A table that grows with the inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x):
        self.table = x.new_zeros(len(x))
        return x + self.table[:, None]


def model(kind):
    torch.manual_seed(0)
    layers = {
        "batch norm": [nn.Linear(3, 4), nn.BatchNorm1d(4)],
        "running means": [nn.Linear(3, 4), Norm()],
        "one rank": [Counts(), nn.Linear(3, 4)],
        "replaced": [Replaced(), nn.Linear(3, 4)],
        "grows": [Grows(), nn.Linear(3, 4)],
    }[kind]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2)).double()


def rows(step):
    return torch.linspace(0, 1, 12, dtype=torch.float64).reshape(4, 3) * (3 * dist.get_rank() + 1) + step


# On the ranks


def trained(name, kind):
    """Parameters and buffers after three steps, of which the second has two micro-batches."""
    is_theirs = name == "DistributedDataParallel"
    net = nn.parallel.DistributedDataParallel(model(kind)) if is_theirs else wrap(name, model(kind))
    tx = torch.optim.SGD(net.parameters(), lr=0.1) if is_theirs else optimizer_of(name, net)
    for step in range(3):
        net.zero_grad()
        if step == 1:
            with net.no_sync():
                net(rows(step + 5)).square().sum().backward()
        net(rows(step)).square().sum().backward()
        if not is_theirs:
            net.finish_gradient_synchronization()
        tx.step()
    buffers = {key: buffer.tolist() for key, buffer in net.module.named_buffers()}
    full = dict(net.module.named_parameters()) if is_theirs else net.gather_full_params()
    return {key: parameter.tolist() for key, parameter in full.items()}, buffers


def other_choice_of_rank_1():
    try:
        torchref.FlatDDP(model("one rank"), broadcast_buffers=dist.get_rank() == 0)
    except ValueError as error:
        return str(error)
    return ""


def message_of(name, kind, broadcasts=True):
    cls, given = WRAPPERS[name]
    net = cls(model(kind), **given, broadcast_buffers=broadcasts)
    net(rows(0)).sum().backward()
    try:
        net.finish_gradient_synchronization()
    except ValueError as error:
        return str(error)
    return ""


# Tests


@pytest.mark.parametrize("kind", ["batch norm", "running means", "one rank", "replaced"])
@pytest.mark.parametrize("name", ["flat", "bucketed", "zero2", "zero3"])
def test_buffers_are_those_of_rank_0(ranks, name, kind):
    first, second = ranks.run(trained, name, kind, num_ranks=2)
    assert first == second
    theirs = ranks.run(trained, "DistributedDataParallel", kind, num_ranks=2)[0]
    for ours, right in zip(first, theirs, strict=True):
        assert ours.keys() == right.keys()
        for key in right if kind != "replaced" else ():  # DistributedDataParallel broadcasts the first tensor for ever
            torch.testing.assert_close(torch.tensor(ours[key]), torch.tensor(right[key]), rtol=1e-10, atol=1e-12)


@wrappers
def test_a_buffer_that_changes_its_shape_is_refused(ranks, name):
    for message in ranks.run(message_of, name, "grows", num_ranks=2):
        assert message.startswith("buffer '0.table' was added, removed, resized or cast after wrapping")


@wrappers
def test_buffers_may_be_left_alone(ranks, name):
    assert ranks.run(message_of, name, "grows", False, num_ranks=2) == ["", ""]


def test_ranks_agree_on_whether_buffers_are_broadcast(ranks):
    for message in ranks.run(other_choice_of_rank_1, num_ranks=2):
        assert message == "broadcast_buffers (=False in rank 1) must be True, as in rank 0"
