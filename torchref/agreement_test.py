"""Ranks that differ in what they train: refused in one line on every rank, which names what and where."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.communication.hooks import bf16
from torchref.passes_test import model, refused, wrap

TRAINED = "2.weight [2, 4] float32 trained"


def reverse_registration(module):
    module[0]._parameters = dict(reversed(module[0]._parameters.items()))


CHANGES = [
    (lambda module: module.append(nn.Linear(2, 2)), "parameter 4 (='3.weight [2, 2] float32 trained'", "absent"),
    (lambda module: module.__setitem__(2, nn.Linear(4, 3)), "parameter 2 (='2.weight [3, 4] float32 trained'", TRAINED),
    (lambda module: module[2].to(torch.float64), "parameter 2 (='2.weight [2, 4] float64 trained'", TRAINED),
    (lambda module: module[2].requires_grad_(False), "parameter 2 (='2.weight [2, 4] float32'", TRAINED),
    (reverse_registration, "parameter 0 (='0.bias [4] float32 trained'", "0.weight [4, 3] float32 trained"),
    (lambda module: module.register_buffer("table", torch.ones(3)), "buffer 0 (='table [3] float32'", "absent"),
]
OPTIMIZERS = [
    ("optimizer (='Adagrad' in rank 1) must be 'SGD'", {"lr": 0.1}, {"cls": torch.optim.Adagrad, "lr": 0.1}),
    ("lr of group 0 (=0.2 in rank 1) must be 0.1", {"lr": 0.1}, {"lr": 0.2}),
    ("lr of group 0 (=0.5 in rank 1) must be 0.25", {"lr": torch.tensor(0.25)}, {"lr": torch.tensor(0.5)}),
    ("momentum of group 0 (=0.5 in rank 1) must be 0", {"lr": 0.1, "momentum": 0.0}, {"lr": 0.1, "momentum": 0.5}),
    ("lr of group 0 (=0.1 in rank 1) must be 0.2", {"lr": 0.1, "faster": 0}, {"lr": 0.1, "faster": 1}),
]


# On the ranks


def wrap_other_modules(name):
    for change, ours, theirs in CHANGES:
        module = model()
        if dist.get_rank() == 1:
            change(module)
        said = f"{ours} in rank 1) must be '{theirs}', as in rank 0"
        assert refused(lambda module=module: wrap(name, module), said)


def wrap_otherwise():
    is_other = dist.get_rank() == 1
    for said, cls, options in (
        ("strategy (='FlatDDP' in rank 1) must be 'BucketedDDP', as in rank 0", torchref.FlatDDP, {}),
        ("plan (='4 buckets, checksum ", torchref.BucketedDDP, {"bucket_mb": 1e-6}),
        ("broadcast_buffers (=False in rank 1) must be ", torchref.BucketedDDP, {"broadcast_buffers": False}),
        ("hook (='<function bf16>' in rank 1) must be '<fu", torchref.BucketedDDP, {"hook": bf16}),
        ("compute_dtype (='torch.bfloat16' in rank 1) must", torchref.FSDP, {"compute_dtype": torch.bfloat16}),
    ):
        cls = cls if is_other or cls is torchref.FSDP else torchref.BucketedDDP  # noqa: PLW2901
        make = functools.partial(cls, **options if is_other else {})
        assert refused(lambda make=make: make(model()), said)


def train_otherwise():
    """Batches and micro-batches; unequally many examples are refused unless the loss has a weight."""
    is_other = dist.get_rank() == 1

    def mean(net, batch):
        return net(batch["x"]).sum(1).mean()

    def weighted(net, batch):
        return torchref.Weighted(net(batch["x"]).sum(), torch.tensor(len(batch["x"])))

    def at_times_weighted(net, batch):
        return torchref.Weighted(0 * net(batch["x"]).sum(), torch.tensor(0)) if is_other else mean(net, batch)

    for said, loss_fn, parts, rows in (
        ("num_microbatches (=2 in rank 1) must be 1, as in rank 0", mean, 1 + is_other, 4),
        ("loss (='mean of 5 examples' in rank 1) must be 'mean of 4 examples', as in rank 0", mean, 1, 4 + is_other),
        ("loss (='Weighted' in rank 1) must be 'mean of 4", at_times_weighted, 1, 4),
        ("", weighted, 1, 4 + is_other),
        ("lr of group 0 (=1 in rank 1) must be 0.1, as in rank 0", mean, 1, 4),
    ):
        if loss_fn is at_times_weighted:  # with an update that communicates, which no rank may leave out alone
            net = optimizer = torchref.ZeRO1(model(), torch.optim.SGD, lr=0.1)
        else:
            net = torchref.BucketedDDP(model())
            optimizer = torch.optim.SGD(net.parameters(), lr=1 if is_other and said.startswith("lr") else 0.1)
        trainer = torchref.Trainer(loss_fn, optimizer, net, num_microbatches=parts)
        is_refused = refused(lambda trainer=trainer, rows=rows: trainer.step({"x": torch.ones(rows, 3)}), said)
        assert bool(is_refused) == bool(said)


def make_other_optimizers(name):
    for said, *of_ranks in OPTIMIZERS:
        module, options = model(), dict(of_ranks[dist.get_rank()])
        cls = options.pop("cls", torch.optim.SGD)
        params = list(module.parameters())
        if "faster" in options:  # which of two groups
            params = [{"params": list(layer.parameters())} for layer in (module[0], module[2])]
            params[options.pop("faster")]["lr"] = 0.2

        def make(module=module, params=params, cls=cls, options=options):
            if name == "sharded optimizer":
                torchref.ShardedOptimizer(params, cls, **options).step()
            else:
                torchref.make_strategy(name, module, optimizer_cls=cls, params=params, **options)

        assert refused(make, said, "as in rank 0")


@pytest.mark.parametrize("name", ["naive", "zero1", "zero3"])
def test_modules_that_differ_are_refused(ranks, name):
    ranks.run(wrap_other_modules, name, num_ranks=2)


@pytest.mark.parametrize("name", ["zero1", "sharded optimizer"])
def test_optimizers_that_differ_are_refused(ranks, name):
    ranks.run(make_other_optimizers, name, num_ranks=2)


@pytest.mark.parametrize("check", [wrap_otherwise, train_otherwise])
def test_wrappers_trainers_and_batches_that_differ_are_refused(ranks, check):
    ranks.run(check, num_ranks=2)
