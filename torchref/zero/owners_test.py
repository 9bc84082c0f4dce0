"""ShardedOptimizer: torch's interface, optimizers that are not element-wise, saved states."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def backward(module):
    total = module(torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)).square().sum()
    total.backward()
    return total


def take_steps(module, optimizer, num_steps):
    for _ in range(num_steps):
        optimizer.zero_grad()
        backward(module)
        optimizer.step()


def same_weights(ours, theirs):
    return all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


# On the ranks


def late_group_closure_and_schedule():
    """A group added during training, options changed outside and closures, compared with torch's own optimizer."""
    ours, theirs = mlp(), mlp()
    optimizers = [
        torchref.ShardedOptimizer(ours[0].parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.5),
        torch.optim.AdamW(theirs[0].parameters(), lr=0.1, weight_decay=0.5),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    losses = []
    for step in range(4):
        for module, optimizer, schedule in zip((ours, theirs), optimizers, schedules, strict=True):
            if step == 2:
                optimizer.add_param_group({"params": module[2].parameters(), "lr": 0.3, "betas": (0.5, 0.6)})
                schedule.base_lrs.append(0.3)
            if step == 3:
                optimizer.param_groups[1]["weight_decay"] = 0.0

            def closure(module=module, optimizer=optimizer):
                optimizer.zero_grad()
                assert torch.is_grad_enabled()
                return backward(module)

            losses.append(optimizer.step(closure).item())
            schedule.step()
    assert losses[::2] == losses[1::2]
    assert optimizers[0].param_groups[1]["eps"] == 1e-8  # a default of the class
    assert isinstance(optimizers[0], torch.optim.Optimizer)
    assert same_weights(ours, theirs)


def scaled():
    net = torchref.BucketedDDP(mlp())
    optimizer = torchref.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for moves in (False, True):
        factor = 1.0 if moves or dist.get_rank() == 0 else float("inf")
        before = copy.deepcopy(net.module)
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(4, 3, dtype=torch.float64)).square().sum() * factor).backward()
        net.finish_gradient_synchronization()
        scaler.step(optimizer)
        scaler.update()
        assert same_weights(before, net.module) != moves


def not_element_wise():
    ours, theirs = mlp(), mlp()
    take_steps(ours, torchref.ShardedOptimizer(ours.parameters(), torch.optim.Adafactor, lr=0.1), 3)
    take_steps(theirs, torch.optim.Adafactor(theirs.parameters(), lr=0.1), 3)
    assert same_weights(ours, theirs)


def saved_and_loaded():
    modules = [mlp(), mlp()]
    optimizers = [torchref.ShardedOptimizer(one.parameters(), torch.optim.AdamW, lr=0.1) for one in modules]
    for module, optimizer in zip(modules, optimizers, strict=True):
        optimizer.param_groups[0]["lr"] = 0.2
        take_steps(module, optimizer, 2)
    saved = optimizers[0].state_dict()
    optimizers[0] = torchref.ShardedOptimizer(modules[0].parameters(), torch.optim.AdamW, lr=0.7)
    optimizers[0].load_state_dict(saved)
    assert optimizers[0].param_groups[0]["lr"] == 0.2
    for module, optimizer in zip(modules, optimizers, strict=True):
        take_steps(module, optimizer, 2)
    assert same_weights(*modules) and len(optimizers[0].state) == len(optimizers[1].state)
    assert {len(optimizers[0].state[one]) for one in modules[0].parameters()} == {0, 3}  # of others, and of its own
    assert optimizers[0].state_dict().keys() == saved.keys()
    assert (saved["rank"], saved["num_ranks"]) == (dist.get_rank(), dist.get_world_size())
    return saved


def loading_anothers(saved):
    optimizer = torchref.ShardedOptimizer(mlp().parameters(), torch.optim.AdamW, lr=0.1)
    found = rf"\(=of rank {saved['rank']} of {saved['num_ranks']}\)"
    mine = rf"\(={optimizer.rank} of {optimizer.num_ranks}\)"
    with pytest.raises(ValueError, match=f"state_dict {found} must be this rank's {mine}: shards do not move"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"state_dict \(=of rank None of None\) must be"):
        optimizer.load_state_dict(torch.optim.AdamW(mlp().parameters()).state_dict())


def frozen_with_a_gradient():
    ours, theirs = mlp(), mlp()
    for module, make in ((ours, torchref.ShardedOptimizer), (theirs, lambda params, cls, **kw: cls(params, **kw))):
        optimizer = make(module.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        take_steps(module, optimizer, 1)
        module[0].requires_grad_(False)
        optimizer.step()
    assert same_weights(ours, theirs)


def no_list_of_parameters():
    module = mlp()
    with pytest.raises(ValueError, match="params must list a parameter: a generator is used up"):
        torchref.ShardedOptimizer(iter(()), torch.optim.SGD, lr=0.1)
    for params in (set(module.parameters()), [{"params": frozenset(module.parameters())}]):
        with pytest.raises(TypeError, match=r"params \(=(frozen)?set\) must be a list"):
            torchref.ShardedOptimizer(params, torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_it_behaves_like_torchs_optimizer(ranks, num_ranks):
    ranks.run(late_group_closure_and_schedule, num_ranks=num_ranks)


@pytest.mark.parametrize("check", [not_element_wise, scaled, frozen_with_a_gradient, no_list_of_parameters])
def test_what_it_takes_and_refuses(ranks, check):
    ranks.run(check, num_ranks=2)


def test_state_loads_on_the_same_rank_only(ranks):
    saved, _ = ranks.run(saved_and_loaded, num_ranks=2)
    ranks.run(loading_anothers, saved, num_ranks=3)
