"""``sync="backward"``: ``loss.backward(); optimizer.step()`` is all that a loop says, under every wrapper."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchref
from torchref.communication.collectives import record
from torchref.passes_test import Fails, strategy_of

NUM_STEPS = 4
ADAMW = {"lr": 0.05, "weight_decay": 0.1}
wrappers = pytest.mark.parametrize("name", ["flat", "bucketed", "zero1", "zero2", "zero3", "sharded optimizer"])


class Model(nn.Module):
    """Of linear layers, which FSDP shards, one of which is not used; and of a norm, which it does not."""

    def __init__(self, norm=True):
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2)
        self.norm = nn.LayerNorm(5) if norm else nn.Identity()

    def forward(self, x, fails=""):
        hidden = self.norm(self.up(x))
        if fails == "forward":
            raise ZeroDivisionError
        return self.down(Fails.apply(hidden) if fails == "backward" else torch.tanh(hidden))


def model(norm=True):
    torch.manual_seed(0)
    return Model(norm).double()


def wrap(name, module):
    if name == "sharded optimizer":
        net = torchref.BucketedDDP(module, sync="backward")
        return net, torchref.ShardedOptimizer(net.parameters(), torch.optim.AdamW, **ADAMW)
    options = {"bucket_mb": 1e-4} if name in ("zero1", "zero2") else {}
    return strategy_of(name, module, torch.optim.AdamW, {**options, "sync": "backward"}, **ADAMW)


def rows(step, part):
    """Of all ranks, ``[num_ranks, 4, 3]``."""
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randn(dist.get_world_size(), 4, 3, dtype=torch.float64, generator=generator)


def check_weights(net, alone):
    found = net.gather_full_params()
    for name, parameter in alone.named_parameters():
        assert (found[name] - parameter).abs().max() <= 1e-12  # float64: the order of sums


# On the ranks


def train(name, num_microbatches, fails, norm):
    """A plain loop, against one process."""
    net, tx = wrap(name, model(norm))
    alone = model(norm)
    tx_alone = torch.optim.AdamW(alone.parameters(), **ADAMW)
    for step in range(NUM_STEPS):
        if fails:  # on all ranks: the batch is dropped
            with pytest.raises(ZeroDivisionError):
                net(rows(step, 0)[dist.get_rank()], fails).sum().backward()
        tx.zero_grad()
        tx_alone.zero_grad()
        for part in range(num_microbatches):
            x = rows(step, part)
            with net.no_sync() if part < num_microbatches - 1 else contextlib.nullcontext():
                net(x[dist.get_rank()]).square().sum().backward()
            (alone(x).square().sum() / net.num_ranks).backward()
        for parameter in alone.parameters():  # as the README says of parameters that are not used
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        tx.step()
        tx_alone.step()
    check_weights(net, alone)


def two_backwards(name, kind):
    """Two synchronised backward passes before a step, which add up, or one that has others within."""
    net, tx = wrap(name, model())
    x, alone = rows(0, 0), model()
    if kind == "checkpoint":
        halves = (checkpoint(net, half.requires_grad_(), use_reentrant=True) for half in x[dist.get_rank()].chunk(2))
        sum(half.square().sum() for half in halves).backward()
    else:
        for half in x[dist.get_rank()].chunk(2):
            net(half).square().sum().backward()
    (alone(x).square().sum() / net.num_ranks).backward()
    for parameter in alone.unused.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tx.step()
    torch.optim.AdamW(alone.parameters(), **ADAMW).step()
    check_weights(net, alone)


def issued_are_the_planned(name):
    net, tx = wrap(name, model())
    with record() as issued:
        net(rows(0, 0)[dist.get_rank()].requires_grad_()).square().sum().backward()
        if tx is net:
            tx.step()
    with pytest.raises(RuntimeError, match="finish_gradient_synchronization was called again without a backward"):
        net.finish_gradient_synchronization()
    planned = sorted(net.planned_collectives())
    for kind in ("all-gather", "all-gather", "reduce-scatter") if name == "zero3" else ():
        planned.remove((kind, 2 * 3 * 8))  # of the unused layer, Linear(2, 2): 2 + 1 elements on each of 2 ranks
    assert sorted(tuple(one) for one in issued) == planned


def bad_input():
    with pytest.raises(ValueError, match=r"sync \(='step'\) must be 'finish' or 'backward'"):
        torchref.NaiveDDP(model(), sync="step")
    net, tx = wrap("naive", model())
    with pytest.raises(ValueError, match=r"sync \(='backward'\) of net must be 'finish': the trainer divides by"):
        torchref.Trainer(lambda net, batch: net(batch["x"]).mean(), tx, net)


def check_all(name):
    for fails in ("", "forward", "backward"):
        train(name, 1 if fails else 3, fails, fails != "backward")
    for kind in ("", "checkpoint"):
        two_backwards(name, kind)
    if name != "sharded optimizer":
        issued_are_the_planned(name)


# Tests


@wrappers
def test_a_plain_loop_is_that_of_one_process_and_ends_with_the_outermost_backward(ranks, name):
    ranks.run(check_all, name, num_ranks=2)


def test_bad_input(ranks):
    ranks.run(bad_input, num_ranks=2)
