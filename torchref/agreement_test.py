"""Ranks that differ in what they train: refused in one line on every rank, which names what and where."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.passes_test import model, refused, wrap

CHANGES = {
    "layer": "parameter 4 (='3.weight [2, 2] float32 trained' in rank 1) must be 'absent'",
    "shape": "parameter 2 (='2.weight [3, 4] float32 trained' in rank 1) must be '2.weight [2, 4] float32 trained'",
    "dtype": "parameter 2 (='2.weight [2, 4] float64 trained' in rank 1) must be '2.weight [2, 4] float32 trained'",
    "requires_grad": "parameter 2 (='2.weight [2, 4] float32' in rank 1) must be '2.weight [2, 4] float32 trained'",
    "order": "parameter 0 (='0.bias [4] float32 trained' in rank 1) must be '0.weight [4, 3] float32 trained'",
    "buffer": "buffer 0 (='table [3] float32' in rank 1) must be 'absent'",
}
OPTIMIZERS = {
    "class": "optimizer (='Adagrad' in rank 1) must be 'SGD', as in rank 0",
    "lr": "lr of group 0 (=0.2 in rank 1) must be 0.1, as in rank 0",
    "tensor": "lr of group 0 (=0.5 in rank 1) must be 0.25, as in rank 0",
    "momentum": "momentum of group 0 (=0.5 in rank 1) must be 0.0, as in rank 0",
    "groups": "lr of group 0 (=0.1 in rank 1) must be 0.2, as in rank 0",
}


# On the ranks


def wrap_other_modules(name):
    for change, said in CHANGES.items():
        module = model()
        if dist.get_rank() == 1:
            if change == "layer":
                module.append(nn.Linear(2, 2))
            elif change == "shape":
                module[2] = nn.Linear(4, 3)
            elif change == "dtype":
                module[2].to(torch.float64)
            elif change == "requires_grad":
                module[2].requires_grad_(False)
            elif change == "order":  # of the registration
                module[0]._parameters = dict(reversed(module[0]._parameters.items()))
            else:
                module.register_buffer("table", torch.ones(3))
        assert refused(lambda module=module: wrap(name, module), f"{said}, as in rank 0")


def wrap_otherwise():
    is_other = dist.get_rank() == 1
    for said, wrap_other in {
        "strategy (='FlatDDP' in rank 1) must be 'BucketedDDP', as in rank 0": torchref.FlatDDP,
        "plan (='4 buckets, checksum ": lambda module: torchref.BucketedDDP(module, bucket_mb=1e-6),
        "sync (='backward' in rank 1) must be 'finish'": lambda module: torchref.BucketedDDP(module, sync="backward"),
        "broadcast_buffers (=False in rank 1) must be True": lambda module: torchref.BucketedDDP(
            module, broadcast_buffers=False
        ),
    }.items():
        assert refused(lambda other=wrap_other: (other if is_other else torchref.BucketedDDP)(model()), said)


def train_otherwise():
    """Batches and micro-batches; unequally many examples are refused unless the loss has a weight."""
    is_other = dist.get_rank() == 1

    def mean(net, batch):
        return net(batch["x"]).sum(1).mean()

    def weighted(net, batch):
        return torchref.Weighted(net(batch["x"]).sum(), torch.tensor(len(batch["x"])))

    for said, loss_fn, parts, rows in (
        ("num_microbatches (=2 in rank 1) must be 1, as in rank 0", mean, 1 + is_other, 4),
        ("batch (='5 examples' in rank 1) must be '4 examples', as in rank 0, unless", mean, 1, 4 + is_other),
        ("", weighted, 1, 4 + is_other),
    ):
        net = torchref.BucketedDDP(model())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        trainer = torchref.Trainer(loss_fn, optimizer, net, num_microbatches=parts)
        assert refused(lambda trainer=trainer, rows=rows: trainer.step({"x": torch.ones(rows, 3)}), said) == bool(said)


def make_other_optimizers(name):
    is_other = dist.get_rank() == 1
    for change, said in OPTIMIZERS.items():
        module = model()
        options = {
            "lr": {"lr": 0.1 * (1 + is_other)},
            "tensor": {"lr": torch.tensor(0.5 if is_other else 0.25)},
            "momentum": {"lr": 0.1, "momentum": 0.5 * is_other},
        }.get(change, {"lr": 0.1})
        cls = torch.optim.Adagrad if change == "class" and is_other else torch.optim.SGD
        groups = [{"params": list(layer.parameters())} for layer in (module[0], module[2])]
        groups[is_other]["lr"] = 0.2
        params = groups if change == "groups" else list(module.parameters())

        def make(module=module, params=params, cls=cls, options=options):
            if name == "sharded optimizer":
                torchref.ShardedOptimizer(params, cls, **options).step()
            else:
                torchref.make_strategy(name, module, optimizer_cls=cls, params=params, **options)

        assert refused(make, said)


# Tests


@pytest.mark.parametrize("name", ["naive", "zero1", "zero3"])
def test_modules_that_differ_are_refused(ranks, name):
    ranks.run(wrap_other_modules, name, num_ranks=2)


@pytest.mark.parametrize("name", ["zero1", "sharded optimizer"])
def test_optimizers_that_differ_are_refused(ranks, name):
    ranks.run(make_other_optimizers, name, num_ranks=2)


@pytest.mark.parametrize("check", [wrap_otherwise, train_otherwise])
def test_wrappers_trainers_and_batches_that_differ_are_refused(ranks, check):
    ranks.run(check, num_ranks=2)
