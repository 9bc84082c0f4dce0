"""State dicts of shards load on their own rank only: optimizer state of ZeRO1 and ZeRO2, parameters of FSDP."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def trained(stage):
    net = stage(mlp(), torch.optim.AdamW, lr=0.1)
    net(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    net.finish_gradient_synchronization()
    net.step()
    return net


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)  # weights only: nothing but tensors and plain values


def refused(found, expected):
    rule = "shards do not move between ranks"
    message = rf"state_dict \(=of rank {found}\) must be this rank's \(={expected}\): {rule}"
    return pytest.raises(ValueError, match=message)


# On the ranks


def states(stage):
    """This rank's state, after loading it into the wrapper and into a copy."""
    net = trained(stage)
    for one in (net, copy.deepcopy(net)):
        saved = through_a_file(one.optimizer.state_dict())
        other = trained(stage)
        other.optimizer.load_state_dict(saved)
        for ours, theirs in zip(net._shards.values(), other._shards.values(), strict=True):
            moments, loaded = net.optimizer.state[ours], other.optimizer.state[theirs]
            assert torch.equal(moments["exp_avg"], loaded["exp_avg"])
    return saved


def load_state_of_another_rank(stage, saved):
    net = trained(stage)
    found, expected = f"{saved['rank']} of {saved['num_ranks']}", f"{dist.get_rank()} of {net.num_ranks}"
    for one in (net, copy.deepcopy(net)):
        with refused(found, expected):
            one.optimizer.load_state_dict(saved)
    with refused("None of None", expected):
        net.optimizer.load_state_dict(torch.optim.AdamW(mlp().parameters()).state_dict())


def shards():
    """This rank's shards, after loading them into another module."""
    net = torchref.FSDP(mlp())
    saved = through_a_file(net.state_dict())
    other = torchref.FSDP(mlp())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(saved)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    return saved


def load_shards_of_another_rank(saved):
    net = torchref.FSDP(mlp())
    before = [parameter.detach().clone() for parameter in net.parameters()]
    marks = saved["_extra_state"]
    for one in (net, copy.deepcopy(net)):
        with refused(f"{marks['rank']} of {marks['num_ranks']}", f"{dist.get_rank()} of {net.num_ranks}"):
            one.load_state_dict(saved)
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), before, strict=True))
    del saved["_extra_state"]
    with pytest.raises(RuntimeError, match="Missing key.*_extra_state"):
        net.load_state_dict(saved)


# In the test process


@pytest.mark.parametrize("stage", [torchref.ZeRO1, torchref.ZeRO2])
def test_optimizer_state_loads_on_its_rank_only(ranks, stage):
    found = ranks.run(states, stage, num_ranks=2)
    assert [(saved["rank"], saved["num_ranks"]) for saved in found] == [(0, 2), (1, 2)]
    ranks.run(load_state_of_another_rank, stage, found[0], num_ranks=3)
    ranks.run(load_state_of_another_rank, stage, {**found[0], "rank": 2}, num_ranks=2)


def test_shards_load_on_their_rank_only(ranks):
    found = ranks.run(shards, num_ranks=2)
    for marks in ({"rank": 2, "num_ranks": 2}, {"rank": 0, "num_ranks": 3}):
        zeros = {name: torch.zeros_like(tensor) for name, tensor in found[0].items() if name != "_extra_state"}
        ranks.run(load_shards_of_another_rank, zeros | {"_extra_state": marks}, num_ranks=2)
