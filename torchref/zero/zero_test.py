"""What all stages guarantee; most functions below run on every rank of a pool."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchref
from jaxddp.communication.buckets import chunk_elements
from torchref.communication.collectives import record
from torchref.registry import make_training
from torchref.train import local_rows

NUM_STEPS = 4
BUCKET_MB = 1e-4  # 13 elements of float64: several buckets of several tensors
OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}
STAGES = ("zero1", "zero2", "zero3")


class Corners(nn.Module):
    """A language model with tied, frozen and unused parameters, leaves smaller than N, a scalar and an empty one."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 1)  # first, so that its gradient is expected last and keeps no bucket waiting
        self.embedding = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.hidden = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = torch.tanh(self.hidden(self.frozen(x))) * self.scale
        return self.head(self.out(self.norm(x)) + self.shift.sum()) + self.empty.sum()


def corners(seed=0):
    torch.manual_seed(seed)
    return Corners().double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [{"tokens": torch.randint(0, 7, (36, 3), generator=generator)} for _ in range(NUM_STEPS)]


def loss_fn(net, batch):
    return F.cross_entropy(net(batch["tokens"]).flatten(0, 1), batch["tokens"].roll(1, dims=1).flatten())


def rows(batch):
    return local_rows(batch, dist.get_rank(), dist.get_world_size())


def wrap(name, module, optimizer="adamw", **options):
    cls, hyper = OPTIMIZERS[optimizer]
    return make_training(name, module, cls, {"bucket_mb": BUCKET_MB} | options, **hyper)


def furthest(net, expected):
    found = net.gather_full_params()
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in found if found[name].numel())


def trained_alone(optimizer, max_grad_norm):
    module = corners()
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    cls, hyper = OPTIMIZERS[optimizer]
    tx = cls(trainable, **hyper)
    for batch in batches():
        tx.zero_grad()
        loss_fn(module, batch).backward()
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = torch.cat([parameter.grad.flatten() for parameter in trainable]).norm()
        for parameter in trainable:
            parameter.grad.mul_(1.0 if max_grad_norm is None else min(1.0, max_grad_norm / norm.item()))
        tx.step()
    return module.state_dict(), norm.item()


# On the ranks


def train_beside_one_process():
    for optimizer, num_microbatches, max_grad_norm in (("momentum", 1, None), ("adamw", 3, 0.3)):
        alone, norm = trained_alone(optimizer, max_grad_norm)
        assert max_grad_norm is None or norm > max_grad_norm  # it is clipped
        for name in (*STAGES, "sharded optimizer"):
            module = corners(seed=dist.get_rank())  # the wrapper must replace the weights of other ranks
            if name == "sharded optimizer":
                net = torchref.BucketedDDP(module)
                cls, hyper = OPTIMIZERS[optimizer]
                tx = torchref.ShardedOptimizer(module.parameters(), cls, **hyper)
            else:
                net, tx = wrap(name, module, optimizer)
            options = {"num_microbatches": num_microbatches, "max_grad_norm": max_grad_norm}
            trainer = torchref.Trainer(loss_fn, tx, net, **options)
            metrics = [trainer.step(rows(batch)) for batch in batches()]
            # float64: only the order of sums differs; any error of meaning is far larger
            assert furthest(net, alone) <= 1e-12, name
            assert abs(metrics[-1]["grad_norm"] - norm) <= 1e-12, name


def issued_and_planned(name, num_microbatches):
    net, tx = wrap(name, corners())
    trainer = torchref.Trainer(loss_fn, tx, net, num_microbatches=num_microbatches)
    with record() as issued:
        trainer.step(rows(batches()[0]))
    return [tuple(one) for one in issued], net.planned_collectives(num_microbatches=num_microbatches)


def issued_collectives_are_the_planned_ones(name):
    for num_microbatches in (1, 3):
        issued, planned = issued_and_planned(name, num_microbatches)
        if name == "zero3":  # the unused unit does not communicate; replicated gradients are reduced in between
            for kind in ("all-gather", "all-gather", "reduce-scatter") * num_microbatches:
                planned.remove((kind, 2 * 2 * 8))  # Linear(2, 1): 1 + 1 elements on each of 2 ranks
            issued.sort()
            planned.sort()
        assert issued == planned
        kinds = [kind for kind, _ in planned]
        assert kinds.count("reduce-scatter") > 3 and kinds.count("all-gather") > 3
        assert ("all-reduce" in kinds) == (name == "zero3")


def gradients_are_reduced_during_the_backward(name):
    net, _ = wrap(name, nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    with record() as issued:
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        during = len(issued)
        net.finish_gradient_synchronization()
    assert during == len(issued) and [one.kind for one in issued].count("reduce-scatter") > 1


def a_rank_keeps_the_state_of_its_shards(name):
    """Adam's moments have the elements of the shards that this rank owns, and at stage 3 of replicated parameters."""
    num_ranks = dist.get_world_size()
    net, tx = wrap(name, corners())
    torchref.Trainer(loss_fn, tx, net).step(rows(batches()[0]))
    states = (tx if name == "zero3" else net.optimizer).state.values()
    sharded = {parameter for parameter in corners().parameters() if parameter.requires_grad}
    replicated = (5, 5, 1, 2) if name == "zero3" else ()  # norm, scale and shift
    right = sum(chunk_elements(parameter.numel(), num_ranks) for parameter in sharded)
    right += sum(size - chunk_elements(size, num_ranks) for size in replicated)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert sum(state[moment].numel() for state in states) == right


def bad_input_is_refused(name):
    with pytest.raises(ValueError, match="the gradient of 'weight' has layout torch.sparse_coo"):
        net, _ = wrap(name, nn.Embedding(4, 3, sparse=True))
        net(torch.tensor([0, 1])).sum().backward()
        net.finish_gradient_synchronization()
    net, _ = wrap(name, corners())
    if name in ("zero1", "zero2"):
        with pytest.raises(RuntimeError, match="step needs averaged gradients"):
            net.step()
    loss_fn(net, rows(batches()[0])).backward()
    net.finish_gradient_synchronization()
    with pytest.raises(ValueError, match=r"max_norm \(=0\) must be positive"):
        net.clip_grad_norm_(0)


def check_all(name):
    a_rank_keeps_the_state_of_its_shards(name)
    if dist.get_world_size() == 1:
        assert issued_and_planned(name, 2) == ([], [])
    if dist.get_world_size() == 2:
        issued_collectives_are_the_planned_ones(name)
        gradients_are_reduced_during_the_backward(name)
        bad_input_is_refused(name)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_training_equals_single_process_training(ranks, num_ranks):
    ranks.run(train_beside_one_process, num_ranks=num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_keeps_its_promises(ranks, name, num_ranks):
    ranks.run(check_all, name, num_ranks=num_ranks)
