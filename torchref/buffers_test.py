"""Buffers that a forward changes: rank 0's on every rank after each synchronisation, as DistributedDataParallel's."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchref.passes_test import optimizer_of, refused, wrap, wrappers

BatchNorm = functools.partial(nn.BatchNorm1d, 4)


class Counts(nn.Module):
    """Counts the rows above a bound, which one rank alone has; the count scales the output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_large", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.num_large += (x.max() > 3).long()
        return x * (1 + 0.1 * self.num_large)


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x):
        self.table = x.new_zeros(len(x))
        return x + self.table[:, None]


def model(kind):
    torch.manual_seed(0)
    linear = nn.Linear(3, 4)
    first = (linear, kind()) if kind is BatchNorm else (kind(), linear)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(4, 2)).double()


def rows(step):
    return torch.linspace(0, 1, 12, dtype=torch.float64).reshape(4, 3) * (3 * dist.get_rank() + 1) + step


# On the ranks


def trained(name, kind):
    """Parameters and buffers after three steps, of which the second has two micro-batches."""
    is_theirs = name == "DistributedDataParallel"
    net = nn.parallel.DistributedDataParallel(model(kind)) if is_theirs else wrap(name, model(kind))
    tx = torch.optim.SGD(net.parameters(), lr=0.1) if is_theirs else optimizer_of(net)
    for step in range(3):
        net.zero_grad()
        if step == 1:
            with net.no_sync():
                net(rows(step + 5)).square().sum().backward()
        net(rows(step)).square().sum().backward()
        if not is_theirs:
            net.finish_gradient_synchronization()
        tx.step()
    full = dict(net.module.named_parameters()) if is_theirs else net.gather_full_params()
    buffers = dict(net.module.named_buffers())
    for buffer in buffers.values() if is_theirs else ():  # they broadcast before the next forward
        dist.broadcast(buffer, 0)
    return full | buffers


def train_beside_theirs(name):
    for kind in (BatchNorm, Counts):
        found, right = trained(name, kind), trained("DistributedDataParallel", kind)
        assert found.keys() == right.keys()
        for key in right:  # float64: the order of sums
            torch.testing.assert_close(found[key].detach(), right[key].detach(), rtol=1e-10, atol=1e-12)


def change_shapes(name):
    for broadcasts in (True, False):
        net = wrap(name, model(Grows), broadcast_buffers=broadcasts)
        net(rows(0)).sum().backward()
        said = refused(net.finish_gradient_synchronization, "buffer '0.table'", "broadcast_buffers")
        assert bool(said) == broadcasts


@pytest.mark.parametrize("name", ["flat", "bucketed", "zero2", "zero3"])
def test_buffers_are_those_of_rank_0(ranks, name):
    ranks.run(train_beside_theirs, name, num_ranks=2)


@wrappers
def test_a_buffer_that_changes_its_shape_is_refused_unless_it_is_left_alone(ranks, name):
    ranks.run(change_shapes, name, num_ranks=2)
