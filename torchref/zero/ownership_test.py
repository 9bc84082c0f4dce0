"""ShardedOptimizer: how parameters are assigned to ranks, and which broadcasts follow."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.communication.collectives import record
from torchref.zero.sharded_optimizer_test import mlp

SIZES = (1000, 1, 30, 500, 999, 250, 250, 7, 0, 640)


# On the ranks


def owned_bytes(add_one_by_one):
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    if add_one_by_one:
        optimizer = torchref.ShardedOptimizer(parameters[:1], torch.optim.SGD, lr=0.1)
        for parameter in parameters[1:]:
            optimizer.add_param_group({"params": parameter})
    else:
        optimizer = torchref.ShardedOptimizer(iter(parameters), torch.optim.SGD, lr=0.1)
    own = [p for group in optimizer.local.param_groups for p in group["params"]]
    assert sum(p.nbytes for p in own) == sum(p.nbytes for p in parameters if optimizer.owner(p) == optimizer.rank)
    return sum(p.nbytes for p in own)


def state_and_broadcasts():
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    module[3].weight.requires_grad_(False)
    module.append(module[0])
    optimizer = torchref.ShardedOptimizer([*module.parameters(), module[0].weight], torch.optim.Adam, lr=0.1)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6  # the tied one once
    module(torch.ones(1, 8)).sum().backward()
    with record() as issued:
        optimizer.step()
    assert optimizer.state is optimizer.local.state
    return sum(state["exp_avg"].nbytes for state in optimizer.state.values()), [one.kind for one in issued]


def owned_bytes_of_some_frozen(sizes, num_frozen):
    """Bytes that each rank owns of what is trained, and of all."""
    parameters = [nn.Parameter(torch.zeros(size), requires_grad=i >= num_frozen) for i, size in enumerate(sizes)]
    optimizer = torchref.ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1)
    own = [parameter for parameter in parameters if optimizer.owner(parameter) == optimizer.rank]
    return sum(p.nbytes for p in own if p.requires_grad), sum(p.nbytes for p in own)


def listed_differently():
    """Different shapes or names, at the start or later, are refused on every rank before anything is sent."""
    message = r"(parameter .|names of group .) \(=.* must be .*, as in rank 0$"
    turn = 1 if dist.get_rank() == 0 else -1
    by_shape = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 4), (4, 2), (8,))][::turn]
    by_name = list(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)).named_parameters())[::turn]
    for params in (by_shape, by_name, by_shape[: 2 + turn]):
        optimizer = torchref.ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
        with record() as issued, pytest.raises(ValueError, match=message):
            optimizer.step()
        assert not issued
    optimizer = torchref.ShardedOptimizer(mlp().parameters(), torch.optim.SGD, lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": by_shape})
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def from_different_weights():
    """Ranks with different weights agree after a step, even with fewer parameters than ranks."""
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.fill_(dist.get_rank())
        module.bias.fill_(dist.get_rank())
    optimizer = torchref.ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.0)
    optimizer.step()
    return module.weight.unique().tolist(), module.bias.unique().tolist()


# In the test process


@pytest.mark.parametrize("add_one_by_one", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_assignment_is_balanced(ranks, num_ranks, add_one_by_one):
    owned = ranks.run(owned_bytes, add_one_by_one, num_ranks=num_ranks)
    total = sum(SIZES) * 4
    assert sum(owned) == total
    assert max(owned) <= total / num_ranks + max(SIZES) * 4
    if not add_one_by_one:  # largest first
        assert max(owned) <= 1.1 * max(total / num_ranks, max(SIZES) * 4)


def test_state_is_sharded_and_parameters_are_broadcast(ranks):
    # 5 trained weights of 256 bytes. The frozen one is neither balanced with them nor sent.
    found = ranks.run(state_and_broadcasts, num_ranks=2)
    assert sorted(num_bytes for num_bytes, _ in found) == [2 * 256, 3 * 256]
    assert all(kinds == ["broadcast"] * 5 for _, kinds in found)


@pytest.mark.parametrize(
    ("sizes", "num_frozen", "trained", "total"),
    [
        ([64] * 8, 7, [0, 256], [1024, 1024]),  # layers to be unfrozen one by one
        ([4096, 64, 64, 64, 64], 1, [512, 512], [512, 512 + 16384]),  # a large one that stays frozen
    ],
)
def test_trainable_and_frozen_parameters_are_both_balanced(ranks, sizes, num_frozen, trained, total):
    found = ranks.run(owned_bytes_of_some_frozen, sizes, num_frozen, num_ranks=2)
    assert sorted(now for now, _ in found) == trained
    assert sorted(owned for _, owned in found) == total


def test_ranks_must_list_the_same_parameters(ranks):
    ranks.run(listed_differently, num_ranks=3)


def test_every_rank_gets_the_owners_weights(ranks):
    first, *others = ranks.run(from_different_weights, num_ranks=3)
    assert all(other == first for other in others)
    assert first == ([0], [1])  # the larger one is assigned first
