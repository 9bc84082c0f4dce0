"""fp16 gradients are divided before they are cast: what has a mean below 65504 arrives, whatever it is the sum of."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.communication import compression

STRATEGIES = ["naive", "flat", "overlapped", "bucketed", "zero1", "zero2"]


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x.mean() * self.weight.sum()


# On the ranks


def gradients(name, num_microbatches, is_weighted):
    """Of three steps of SGD at rate 1, from the changes of the weights."""
    owns = {"optimizer_cls": torch.optim.SGD, "lr": 1.0} if name in ("zero1", "zero2") else {}
    net = torchref.make_strategy(name, Linear(), compression=compression.fp16, **owns)
    tx = net if owns else torch.optim.SGD(net.parameters(), lr=1.0)

    def loss_fn(net, batch):
        loss = net(batch["x"])
        count = torch.tensor(200_000.0 / num_microbatches)
        return torchref.Weighted(loss * count, count) if is_weighted else loss

    trainer = torchref.Trainer(loss_fn, tx, net, num_microbatches=num_microbatches)
    found = []
    for step in range(3):
        before = net.module.weight.detach().clone()
        trainer.step({"x": torch.full((8,), (1.0 if is_weighted else 3e4) * (1 + dist.get_rank() * (step == 1)))})
        found.append((before - net.module.weight.detach()).tolist())
    return found


# Tests


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_means_arrive(ranks, name, num_microbatches, is_weighted):
    right = torch.tensor([1.0, 1.5, 1.0])[:, None].expand(3, 3) * (1.0 if is_weighted else 3e4)
    for found in ranks.run(gradients, name, num_microbatches, is_weighted, num_ranks=2):
        torch.testing.assert_close(torch.tensor(found), right, rtol=2e-3, atol=0)
