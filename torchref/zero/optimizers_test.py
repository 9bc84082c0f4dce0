"""State dicts of shards load on their own rank only: optimizer state of ZeRO1 and ZeRO2, parameters of FSDP."""

import copy
import io
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref import agreement


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


def sharded(module, cls, **options):
    """A ``ShardedOptimizer`` with the methods of a wrapper."""
    net = torchref.BucketedDDP(module)
    net.optimizer = torchref.ShardedOptimizer(module.parameters(), cls, **options)
    net.step = net.optimizer.step
    return net


def steps_after_loading(stage, kind):
    """What the step after a load is refused with."""
    net, is_other = trained(stage), dist.get_rank() == 1
    saved = through_a_file(net.optimizer.state_dict())
    if kind == "by one before the first step":
        net = stage(mlp(), torch.optim.AdamW, lr=0.1)
    if is_other and kind == "of another step":
        saved["state"][0]["step"] += 5
    elif is_other and kind == "of other options":
        saved["param_groups"][0]["lr"] = 0.2
    try:
        with unittest.mock.patch.object(agreement, "_LATE_S", 0.1):
            for turn in range(2):
                all_load = kind == "by all" or kind.startswith("of") or (kind == "by one later" and turn == 0)
                if is_other or all_load:
                    net.optimizer.load_state_dict(saved)
                net.zero_grad()
                net(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
                net.finish_gradient_synchronization()
                net.step()
                if not all_load:
                    break
    except ValueError as error:
        return str(error)
    return ""


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


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["by one", "by one before the first step", "by one later"])
@pytest.mark.parametrize("stage", [torchref.ZeRO1, torchref.ZeRO2, sharded])
def test_state_that_one_rank_loads_is_refused_at_its_next_step(ranks, stage, kind):
    first, second = ranks.run(steps_after_loading, stage, kind, num_ranks=2)
    assert first == ""
    assert second == (
        "optimizer state was loaded on rank 1 and not on rank 0: load it on every rank before the same step"
    )


@pytest.mark.parametrize("stage", [torchref.ZeRO1, torchref.ZeRO2, sharded])
def test_state_of_other_options_is_refused(ranks, stage):
    for message in ranks.run(steps_after_loading, stage, "of other options", num_ranks=2):
        assert message == "lr of group 0 (=0.2 in rank 1) must be 0.1, as in rank 0"


@pytest.mark.parametrize("stage", [torchref.ZeRO1, torchref.ZeRO2])
def test_state_of_another_step_is_refused(ranks, stage):
    for message in ranks.run(steps_after_loading, stage, "of another step", num_ranks=2):
        assert message.startswith("state of 0.weight (={'step': 6.0") and "must be {'step': 1.0" in message


@pytest.mark.parametrize("stage", [torchref.ZeRO1, torchref.ZeRO2, sharded])
def test_state_that_all_ranks_load_is_used(ranks, stage):
    assert ranks.run(steps_after_loading, stage, "by all", num_ranks=2) == ["", ""]


def test_shards_load_on_their_rank_only(ranks):
    found = ranks.run(shards, num_ranks=2)
    for marks in ({"rank": 2, "num_ranks": 2}, {"rank": 0, "num_ranks": 3}):
        zeros = {name: torch.zeros_like(tensor) for name, tensor in found[0].items() if name != "_extra_state"}
        ranks.run(load_shards_of_another_rank, zeros | {"_extra_state": marks}, num_ranks=2)
