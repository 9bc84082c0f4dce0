"""The assignment's wrapper with buckets: hooks start the all-reduce of a bucket when its last gradient is ready."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.train import local_rows

STRATEGIES = ("bucketed", "zero3")


def make_model() -> nn.Module:
    """A perceptron in float64, with other weights on each rank."""
    torch.manual_seed(dist.get_rank())
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(16, 5)).double()


def data() -> list[Any]:
    """Global batches of inputs and labels."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 20, 16, dtype=torch.float64, generator=rng)
    return list(zip(inputs, torch.randint(5, (5, 20), generator=rng), strict=True))


def before(batches: Any) -> Any:
    """With a wrapper of its own."""

    class Bucketed(nn.Module):
        def __init__(self, module: nn.Module, bucket_mb: float) -> None:
            super().__init__()
            self.module, num_bytes = module, 0
            self.works: list[Any] = []
            self.buckets: list[list[Any]] = [[]]
            self.place: dict[Any, int] = {}
            for parameter in reversed(list(module.parameters())):
                dist.broadcast(parameter.data, 0)
                num_bytes += parameter.nbytes
                if self.buckets[-1] and num_bytes > bucket_mb * 2**20:
                    self.buckets.append([])
                    num_bytes = parameter.nbytes
                self.buckets[-1].append(parameter)
                self.place[parameter] = len(self.buckets) - 1
                parameter.register_post_accumulate_grad_hook(self.note)
            self.start_batch()

        def start_batch(self) -> None:
            self.missing = [len(bucket) for bucket in self.buckets]

        def note(self, parameter: torch.Tensor) -> None:
            index = self.place[parameter]
            self.missing[index] -= 1
            if not self.missing[index]:
                buffer = torch.cat([one.grad.flatten() for one in self.buckets[index]])
                self.works.append((dist.all_reduce(buffer, async_op=True), buffer, self.buckets[index]))

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

        def finish_gradient_synchronization(self) -> None:
            for work, buffer, bucket in self.works:
                work.wait()
                means = (buffer / dist.get_world_size()).split([one.numel() for one in bucket])
                for one, mean in zip(bucket, means, strict=True):
                    one.grad = mean.view_as(one)
            self.works.clear()

    net = Bucketed(make_model(), bucket_mb=0.001)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for batch in batches:
        net.start_batch()
        inputs, labels = local_rows(batch, dist.get_rank(), dist.get_world_size())
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        net.finish_gradient_synchronization()
        optimizer.step()
    return dict(net.module.named_parameters())


def after(batches: Any, wrap: Callable[..., torchref.DataParallel]) -> Any:
    """With one that is there."""
    net = wrap(make_model(), bucket_mb=0.001)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for batch in batches:
        net.on_train_batch_start()
        inputs, labels = local_rows(batch, dist.get_rank(), dist.get_world_size())
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        net.finish_gradient_synchronization()
        optimizer.step()
    return net.gather_full_params()
