"""``sync="backward"``: ``loss.backward(); optimizer.step()`` is all that a loop says, under every wrapper."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchref
from torchref.communication.collectives import record
from torchref.passes_test import WRAPPERS, Blocks, Fails

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
    cls, options = WRAPPERS.get(name, (torchref.BucketedDDP, {}))
    if "optimizer_cls" in options:
        options = {**options, "optimizer_cls": torch.optim.AdamW, "bucket_mb": 1e-4, **ADAMW}
    net = cls(module, **options, sync="backward")
    return net, optimizer_of(name, net)


def optimizer_of(name, net):
    if net.owns_optimizer:
        return net
    if name == "sharded optimizer":
        return torchref.ShardedOptimizer(net.parameters(), torch.optim.AdamW, **ADAMW)
    return torch.optim.AdamW(net.parameters(), **ADAMW)


def rows(step, part):
    """Of all ranks, ``[num_ranks, 4, 3]``."""
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randn(dist.get_world_size(), 4, 3, dtype=torch.float64, generator=generator)


def furthest(net, alone):
    found = net.gather_full_params()
    return max((found[name] - parameter).abs().max().item() for name, parameter in alone.named_parameters())


# On the ranks


def trained(name, num_microbatches, fails, norm):
    """How far a plain loop is from one process."""
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
    return furthest(net, alone)


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
    return furthest(net, alone)


def issued_and_planned(name):
    net, tx = wrap(name, model())
    with record() as issued:
        net(rows(0, 0)[dist.get_rank()].requires_grad_()).square().sum().backward()
        if tx is net:
            tx.step()
    with pytest.raises(RuntimeError, match="finish_gradient_synchronization was called again without a backward"):
        net.finish_gradient_synchronization()
    return sorted(tuple(one) for one in issued), sorted(net.planned_collectives())


def backward_within(name, within):
    """How far a step is from one process, and the gradients' collectives with and without a backward within."""
    found, counts = [], []
    for one in (within, ""):
        module, alone = Blocks(one), Blocks("")
        cls, options = WRAPPERS[name]
        net = cls(module, **options, sync="backward")
        tx = net if net.owns_optimizer else torch.optim.SGD(net.parameters(), lr=0.1)
        x = rows(0, 0)
        with record() as issued:
            net(x[dist.get_rank()]).square().sum().backward()
        counts.append([kind for kind, _ in issued if kind != "all-gather"])
        tx.step()
        (alone(x).square().sum() / net.num_ranks).backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        found.append(furthest(net, alone))
    return max(found), counts


def bad_input():
    with pytest.raises(ValueError, match=r"sync \(='step'\) must be 'finish' or 'backward'"):
        torchref.NaiveDDP(model(), sync="step")
    with pytest.raises(ValueError, match="BucketedDDP has no option bucket_cap_mb; the caps of buckets are bucket_mb"):
        torchref.BucketedDDP(model(), bucket_cap_mb=25, device_ids=None)
    net, tx = wrap("naive", model())
    with pytest.raises(ValueError, match=r"sync \(='backward'\) of net must be 'finish': the trainer divides by"):
        torchref.Trainer(lambda net, batch: net(batch["x"]).mean(), tx, net)


def check_all(name):
    for fails in ("", "forward", "backward"):
        assert trained(name, 1 if fails else 3, fails, fails != "backward") <= 1e-12, (
            fails
        )  # float64: the order of sums
    for kind in ("", "checkpoint"):
        assert two_backwards(name, kind) <= 1e-12, kind  # float64: the order of sums
    if name in WRAPPERS:
        issued, planned = issued_and_planned(name)
        for kind in ("all-gather", "all-gather", "reduce-scatter") if name == "zero3" else ():
            planned.remove((kind, 2 * 3 * 8))  # of the unused layer, Linear(2, 2): 2 + 1 elements on each of 2 ranks
        assert issued == planned
        for within in ("checkpoint", "function"):
            difference, (within_one, plain) = backward_within(name, within)
            assert difference <= 1e-12, within  # float64: the order of sums
            assert sorted(within_one) == sorted(plain), within


# Tests


@wrappers
def test_a_plain_loop_is_that_of_one_process_and_ends_with_the_outermost_backward(ranks, name):
    ranks.run(check_all, name, num_ranks=2)


def test_bad_input(ranks):
    ranks.run(bad_input, num_ranks=2)
