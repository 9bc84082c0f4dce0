"""Ranks that no longer hold the same: a flipped bit is found, and named on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from jaxddp.processes.roll_call import ReplicaError
from torchref.registry import make_training
from torchref.replicas import _checksum, check_replicas


def trainer_of(strategy):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net, optimizer = make_training(strategy, module, torch.optim.Adam, {}, lr=0.1)
    return torchref.Trainer(lambda net, batch: net(batch["x"]).square().mean(), optimizer, net)


def flipped(strategy, place, faulty):
    trainer = trainer_of(strategy)
    module = trainer.net.module
    trainer.step({"x": torch.randn(6, 3, generator=torch.Generator().manual_seed(dist.get_rank()))})
    check_replicas(trainer)  # they are equal so far
    if dist.get_rank() in faulty:
        tensor = {
            "weight": lambda: module[2].weight,
            "norm": lambda: module[1].weight,
            "buffer": lambda: module[1].running_var,
            "moment": lambda: trainer.optimizer.state[module[2].weight]["exp_avg"],
        }[place]()
        bits = tensor.detach().view(-1)[1:2].view(torch.int32)
        bits ^= 1
    try:
        check_replicas(trainer)
    except ReplicaError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("strategy", "place", "name"),
    [
        ("bucketed", "weight", "params.2.weight"),
        ("bucketed", "moment", "state.exp_avg.2.weight"),
        ("zero1", "weight", "params.2.weight"),
        ("zero3", "norm", "params.1.weight"),
        ("zero2", "buffer", "buffers.1.running_var"),
    ],
)
def test_a_flipped_bit_is_named_on_every_rank(ranks, strategy, place, name):
    for message in ranks.run(flipped, strategy, place, (1,), num_ranks=3):
        assert message.startswith(f"{name} of rank 1 differs from what most ranks hold after step 1:")


def test_most_ranks_decide_and_ranks_that_hold_the_same_and_one_rank_alone_pass(ranks):
    for message in ranks.run(flipped, "flat", "weight", (0, 2, 3), num_ranks=4):
        assert message.startswith("params.2.weight of rank 1 differs ")
    assert ranks.run(flipped, "bucketed", "weight", (), num_ranks=2) == [None, None]
    assert ranks.run(flipped, "bucketed", "weight", (0,), num_ranks=1) == [None]


def with_own_buffers():
    torch.manual_seed(0)
    net = torchref.BucketedDDP(nn.BatchNorm1d(3), broadcast_buffers=False)
    net(torch.full((2, 3), float(dist.get_rank())))
    check_replicas(torchref.Trainer(print, torch.optim.SGD(net.parameters(), lr=0.1), net))


def test_buffers_that_are_each_ranks_own_may_differ(ranks):
    ranks.run(with_own_buffers, num_ranks=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_every_bit_of_every_dtype_counts(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    changed = tensor.clone()
    changed[1, 2] = 0
    assert _checksum(tensor) != _checksum(changed)
    assert _checksum(tensor.T) == _checksum(tensor.T.contiguous())
