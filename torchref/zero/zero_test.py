"""What all stages guarantee; most functions below run on every rank of a pool."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchref
from jaxddp.communication.buckets import chunk_elements
from torchref.communication.collectives import record
from torchref.strategy import planned_collectives
from torchref.train import local_rows

NUM_STEPS = 4
BUCKET_MB = 1e-4  # 13 elements of float64: several buckets of several tensors
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}
STAGES = ("zero1", "zero2", "zero3")
stages = pytest.mark.parametrize("name", STAGES)


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
    """The wrapped module, and what takes its steps."""
    cls, hyper = OPTIMIZERS[optimizer]
    options = {"bucket_mb": BUCKET_MB} | options
    if name == "zero3":
        net = torchref.make_strategy(name, module, **options)
        return net, cls(net.parameters(), **hyper)
    net = torchref.make_strategy(name, module, optimizer_cls=cls, **options, **hyper)
    return net, net


def weights(net):
    full = net.gather_full_params() if isinstance(net, torchref.FSDP) else net.module.state_dict()
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def furthest(found, expected):
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in found if found[name].numel())


def trained_alone(optimizer, max_grad_norm):
    """A plain loop over whole batches."""
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


def trained(optimizer, num_microbatches, max_grad_norm):
    """The last norm of single-process training, and each strategy's difference from it in weights and norm."""
    alone, norm = trained_alone(optimizer, max_grad_norm)
    found = {}
    for name in (*STAGES, "sharded optimizer"):
        module = corners(seed=dist.get_rank())  # the wrapper must replace the weights of other ranks
        if name == "sharded optimizer":
            net = torchref.BucketedDDP(module)
            cls, hyper = OPTIMIZERS[optimizer]
            tx = torchref.ShardedOptimizer(module.parameters(), cls, **hyper)
        else:
            net, tx = wrap(name, module, optimizer)
        trainer = torchref.Trainer(loss_fn, tx, net, num_microbatches=num_microbatches, max_grad_norm=max_grad_norm)
        metrics = [trainer.step(rows(batch)) for batch in batches()]
        found[name] = furthest(weights(net), alone), abs(metrics[-1]["grad_norm"] - norm)
    return norm, found


def issued_and_planned(name, num_microbatches):
    net, tx = wrap(name, corners())
    trainer = torchref.Trainer(loss_fn, tx, net, num_microbatches=num_microbatches)
    with record() as issued:
        trainer.step(rows(batches()[0]))
    return [tuple(one) for one in issued], planned_collectives(net, num_microbatches=num_microbatches)


def issued_during_the_backward(name):
    net, _ = wrap(name, nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    with record() as issued:
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        during = [one.kind for one in issued]
        net.finish_gradient_synchronization()
    return during, [one.kind for one in issued]


def state_elements(name):
    """Elements of Adam's moments on this rank, and of the shards that it should own."""
    net, tx = wrap(name, corners())
    torchref.Trainer(loss_fn, tx, net).step(rows(batches()[0]))
    states = (tx if name == "zero3" else net.optimizer).state.values()
    sharded = {parameter for parameter in corners().parameters() if parameter.requires_grad}
    return (
        sum(state["exp_avg"].numel() for state in states),
        sum(state["exp_avg_sq"].numel() for state in states),
        sum(chunk_elements(parameter.numel(), dist.get_world_size()) for parameter in sharded),
    )


def sparse_gradients(name):
    net, _ = wrap(name, nn.Embedding(4, 3, sparse=True))
    message = "the gradient of 'weight' has layout torch.sparse_coo: only dense gradients are supported"
    with pytest.raises(ValueError, match=message):
        net(torch.tensor([0, 1])).sum().backward()
        net.finish_gradient_synchronization()


def bad_input(name):
    with pytest.raises(ValueError, match=r"module \(=Corners\) must have a parameter that needs a gradient"):
        wrap(name, corners().requires_grad_(False))
    with pytest.raises(ValueError, match=r"bucket_mb \(=-1\) must be a positive number"):
        wrap(name, corners(), bucket_mb=-1)
    with pytest.raises(ValueError, match=r"rule \(='after'\) must be 'before' or 'torch'"):
        wrap(name, corners(), rule="after")
    net, _ = wrap(name, corners())
    loss_fn(net, rows(batches()[0])).backward()
    net.finish_gradient_synchronization()
    with pytest.raises(ValueError, match=r"max_norm \(=0\) must be positive"):
        net.clip_grad_norm_(0)


# In the test process


@pytest.mark.sample
@pytest.mark.parametrize(("num_microbatches", "max_grad_norm"), [(1, None), (3, 0.3)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_training_equals_single_process_training(ranks, num_ranks, optimizer, num_microbatches, max_grad_norm):
    for norm, found in ranks.run(trained, optimizer, num_microbatches, max_grad_norm, num_ranks=num_ranks):
        assert max_grad_norm is None or norm > max_grad_norm  # it is clipped
        assert len(found) == len(STAGES) + 1
        for name, differences in found.items():
            # float64: only the order of sums differs; any error of meaning is far larger
            assert max(differences) <= 1e-12, (name, differences)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@stages
def test_issued_collectives_are_the_planned_ones(ranks, name, num_microbatches):
    for issued, planned in ranks.run(issued_and_planned, name, num_microbatches, num_ranks=2):
        if name == "zero3":  # the unused unit does not communicate; replicated gradients are reduced in between
            for kind in ("all-gather", "all-gather", "reduce-scatter") * num_microbatches:
                planned.remove((kind, 2 * 2 * 8))  # Linear(2, 1): 1 + 1 elements on each of 2 ranks
            issued.sort()
            planned.sort()
        assert issued == planned
        kinds = [kind for kind, _ in planned]
        assert kinds.count("reduce-scatter") > 3
        assert kinds.count("all-gather") > 3
        assert ("all-reduce" in kinds) == (name == "zero3")


@stages
def test_one_rank_communicates_nothing(ranks, name):
    assert ranks.run(issued_and_planned, name, 2, num_ranks=1) == [([], [])]


@stages
def test_gradients_are_reduced_during_the_backward(ranks, name):
    for during, all_of_them in ranks.run(issued_during_the_backward, name, num_ranks=2):
        assert during == all_of_them
        assert during.count("reduce-scatter") > 1


@stages
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_rank_keeps_the_state_of_its_shards(ranks, name, num_ranks):
    replicated = (5, 5, 1, 2) if name == "zero3" else ()  # norm, scale and shift
    more = sum(size - chunk_elements(size, num_ranks) for size in replicated)
    for exp_avg, exp_avg_sq, of_shards in ranks.run(state_elements, name, num_ranks=num_ranks):
        assert exp_avg == exp_avg_sq == of_shards + more


@stages
def test_only_dense_gradients_are_supported(ranks, name):
    ranks.run(sparse_gradients, name, num_ranks=2)


@stages
def test_bad_input(ranks, name):
    ranks.run(bad_input, name, num_ranks=2)
