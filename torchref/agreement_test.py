"""Ranks that differ in what they train: refused in one line on every rank, which names what and where."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.late_parameters_test import model, wrap, wrappers

CHANGES = {
    "layer": "parameter 4 (='3.weight [2, 2] float32 trained' in rank 1) must be 'absent'",
    "shape": "parameter 2 (='2.weight [3, 4] float32 trained' in rank 1) must be '2.weight [2, 4] float32 trained'",
    "dtype": "parameter 2 (='2.weight [2, 4] float64 trained' in rank 1) must be '2.weight [2, 4] float32 trained'",
    "requires_grad": "parameter 2 (='2.weight [2, 4] float32' in rank 1) must be '2.weight [2, 4] float32 trained'",
    "order": "parameter 0 (='0.bias [4] float32 trained' in rank 1) must be '0.weight [4, 3] float32 trained'",
    "buffer": "buffer 0 (='table [3] float32' in rank 1) must be 'absent'",
}


# On the ranks


def message_of(name, change):
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
    try:
        wrap(name, module)
    except ValueError as error:
        return str(error)
    return ""


def message_of_other_wrappers(change):
    is_other = dist.get_rank() == 1
    try:
        if change == "strategy" and is_other:
            torchref.FlatDDP(model())
        elif change == "plan" and is_other:
            torchref.BucketedDDP(model(), bucket_mb=1e-6)
        elif change == "sync" and is_other:
            torchref.BucketedDDP(model(), sync="backward")
        else:
            net = torchref.BucketedDDP(model())
            rows = 4 + (change in ("rows", "weighted")) * is_other
            parts = 2 if change == "micro-batches" and is_other else 1
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

            def loss_fn(net, batch):
                losses = net(batch["x"]).sum(1)
                return torchref.Weighted(losses.sum(), torch.tensor(rows)) if change == "weighted" else losses.mean()

            trainer = torchref.Trainer(loss_fn, optimizer, net, num_microbatches=parts)
            before = net.module[0].weight.clone()
            try:
                trainer.step({"x": torch.ones(rows, 3)})
            finally:
                moved = not torch.equal(before, net.module[0].weight)
                assert moved == (change == "weighted")
    except ValueError as error:
        return str(error)
    return ""


def message_of_optimizers(name, change):
    is_other = dist.get_rank() == 1
    module = model()
    classes = {"class": [torch.optim.SGD, torch.optim.Adagrad]}.get(change, [torch.optim.SGD] * 2)
    options = {
        "class": {"lr": 0.1},
        "lr": {"lr": 0.1 * (1 + is_other)},
        "tensor": {"lr": torch.tensor(0.5 if is_other else 0.25)},
        "momentum": {"lr": 0.1, "momentum": 0.5 * is_other},
        "groups": {"lr": 0.1},
    }[change]
    groups = [{"params": list(layer.parameters())} for layer in (module[0], module[2])]
    groups[is_other]["lr"] = 0.2
    params = groups if change == "groups" else list(module.parameters())
    try:
        if name == "sharded optimizer":
            torchref.ShardedOptimizer(params, classes[is_other], **options).step()
        else:
            cls = {"zero1": torchref.ZeRO1, "zero2": torchref.ZeRO2}[name]
            cls(module, optimizer_cls=classes[is_other], params=params, **options)
    except ValueError as error:
        return str(error)
    return ""


OPTIMIZERS = {
    "class": "optimizer (='Adagrad' in rank 1) must be 'SGD', as in rank 0",
    "lr": "lr of group 0 (=0.2 in rank 1) must be 0.1, as in rank 0",
    "tensor": "lr of group 0 (=0.5 in rank 1) must be 0.25, as in rank 0",
    "momentum": "momentum of group 0 (=0.5 in rank 1) must be 0.0, as in rank 0",
    "groups": "lr of group 0 (=0.1 in rank 1) must be 0.2, as in rank 0",
}


# Tests


@pytest.mark.parametrize("change", OPTIMIZERS)
@pytest.mark.parametrize("name", ["zero1", "zero2", "sharded optimizer"])
def test_optimizers_that_differ_are_refused(ranks, name, change):
    for message in ranks.run(message_of_optimizers, name, change, num_ranks=2):
        assert message == OPTIMIZERS[change]


@pytest.mark.parametrize("change", CHANGES)
@wrappers
def test_modules_that_differ_are_refused(ranks, name, change):
    for message in ranks.run(message_of, name, change, num_ranks=2):
        assert message == f"{CHANGES[change]}, as in rank 0"


OTHERS = {
    "strategy": "strategy (='FlatDDP' in rank 1) must be 'BucketedDDP', as in rank 0",
    "sync": "sync (='backward' in rank 1) must be 'finish', as in rank 0",
    "plan": "plan (='4 buckets, checksum ",
    "micro-batches": "num_microbatches (=2 in rank 1) must be 1, as in rank 0",
    "rows": "batch (='5 examples' in rank 1) must be '4 examples', as in rank 0, unless loss_fn returns Weighted",
    "weighted": "",
}


@pytest.mark.parametrize("change", OTHERS)
def test_wrappers_trainers_and_batches_that_differ_are_refused(ranks, change):
    for message in ranks.run(message_of_other_wrappers, change, num_ranks=2):
        assert message.startswith(OTHERS[change])
        assert bool(message) == bool(OTHERS[change]) and "\n" not in message
