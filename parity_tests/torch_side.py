"""Training in PyTorch: with torchref's trainer on a rank, and in a plain loop on one process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import torchref
from torchref import plain
from torchref.communication import collectives
from torchref.interop import from_numpy, to_numpy
from torchref.launch import RankPool
from torchref.models.toy_test import build, loss_fn
from torchref.registry import make_training
from torchref.train import local_rows

from .cases import LEARNING_RATES, STRATEGIES, Case
from .inputs import Arrays, batches

# foreach and fused kernels round differently from the plain formula.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
    "momentum": (torch.optim.SGD, {"lr": 0.03, "momentum": 0.9, "foreach": False}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01, "foreach": False}),
    "adamw_masked": (torch.optim.AdamW, {"weight_decay": 0.01, "foreach": False}),
}


def train_on_rank(case: Case, weights: Arrays, **options: Any) -> Arrays:
    """Trains on this rank's share of every batch, with more options of the strategy; runs in a rank process."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    module = build(case.model, seed=rank).to(device, getattr(torch, case.dtype))
    if rank == 0:  # the other ranks start from different weights, which the wrapper must replace
        from_numpy(weights, module)
    net, optimizer, scheduled = _wrap(case, module, options)
    trainer = torchref.Trainer(
        loss_fn, optimizer, net, num_microbatches=case.num_microbatches, max_grad_norm=case.max_grad_norm
    )
    for step, batch in enumerate(batches(case.model, case.dtype)):
        _set_learning_rate(case.optimizer, scheduled, step)
        trainer.step(local_rows(_tensors(batch, device), rank, case.num_ranks))
    return {name: tensor.cpu().numpy() for name, tensor in net.gather_full_params().items()}


def _wrap(case: Case, module: torch.nn.Module, options: dict[str, Any]) -> tuple[Any, Any, torch.optim.Optimizer]:
    """The wrapped module, what takes its steps, and the optimizer that a schedule drives."""
    strategy = STRATEGIES[case.strategy]
    options = strategy.torch_options | options
    optimizer_cls, kwargs = OPTIMIZERS[case.optimizer]
    matrices = {name for name, parameter in module.named_parameters() if parameter.ndim > 1}
    wrap: Any = torchref.STRATEGIES[strategy.name]
    if wrap.owns_optimizer:
        groups = _groups(case.optimizer, module, matrices)
        net = wrap(module, optimizer_cls, params=groups, **options, **kwargs)
        return net, net, net.optimizer
    net = wrap(module, **options)
    optimizer = optimizer_cls(_groups(case.optimizer, net.module, matrices), **kwargs)
    return net, optimizer, optimizer


def _groups(optimizer: str, module: torch.nn.Module, matrices: set[str]) -> Any:
    """The trained parameters as groups of a torch optimizer; chosen by name, because shards are vectors."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if optimizer != "adamw_masked":
        return list(trained.values())
    kept = [parameter for name, parameter in trained.items() if name not in matrices]
    decays = [parameter for name, parameter in trained.items() if name in matrices]
    return [{"params": decays}, {"params": kept, "weight_decay": 0.0}]


def _set_learning_rate(optimizer: str, options: torch.optim.Optimizer, step: int) -> None:
    if optimizer == "adamw_masked":
        for group in options.param_groups:
            group["lr"] = LEARNING_RATES[step]


def train_all(cases: Sequence[Case], weights: Arrays, ranks: RankPool) -> list[Arrays]:
    """Trains cases of as many ranks, one after the other in one process group; all must end with the same bits."""
    first, *others = ranks.run(train_all_on_rank, cases, weights, num_ranks=cases[0].num_ranks, timeout_s=900.0)
    for other in others:
        for case, ours, theirs in zip(cases, first, other, strict=True):
            for name, weight in theirs.items():
                assert (weight == ours[name]).all(), f"{case.id}: ranks differ in {name}"
    return first


def train_all_on_rank(cases: Sequence[Case], weights: Arrays) -> list[Arrays]:
    """Trains each case in turn; runs in a rank process."""
    return [train_on_rank(case, weights) for case in cases]


_finished: dict[tuple, Arrays] = {}


def train_on_one_process(case: Case, weights: Arrays) -> Arrays:
    """Trains on whole batches, without torchref; each reference is trained once."""
    key = (case.model, case.optimizer, case.dtype, case.max_grad_norm)
    if key not in _finished:
        _finished[key] = _train_plainly(*key, weights)
    return _finished[key]


def _train_plainly(model: str, optimizer: str, dtype: str, max_grad_norm: float | None, weights: Arrays) -> Arrays:
    module = from_numpy(weights, build(model).to(getattr(torch, dtype)))
    optimizer_cls, kwargs = OPTIMIZERS[optimizer]
    matrices = {name for name, parameter in module.named_parameters() if parameter.ndim > 1}
    tx = optimizer_cls(_groups(optimizer, module, matrices), **kwargs)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for step, batch in enumerate(batches(model, dtype)):
        _set_learning_rate(optimizer, tx, step)
        tx.zero_grad()
        loss_fn(module, _tensors(batch, torch.device("cpu"))).backward()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if max_grad_norm is not None:
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            norm = torch.cat([grad.flatten() for grad in grads]).norm()
            for grad in grads:
                grad.mul_(min(1.0, max_grad_norm / norm.item()))
        tx.step()
    return to_numpy(module)


def _tensors(batch: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}


# What single tests run on ranks, which would else import JAX with the test's file.


def train_plain_on_rank(
    name: str, optimizer: str, weights: Arrays, num_steps: int, options: dict[str, Any]
) -> tuple[Arrays, list[int]]:
    """Trains the toy in float64 with ``torchref.plain``.

    Returns:
        The weights, and the bytes that each parameter of the module still holds.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = build("toy", seed=rank).double()
    if rank == 0:  # the others start from weights of their own, which the strategy has to replace
        from_numpy(weights, module)
    optimizer_cls, kwargs = OPTIMIZERS[optimizer]
    step = getattr(plain, name)(loss_fn, partial(optimizer_cls, **kwargs), module, **options)
    step, shards = step if name == "zero3" else (step, [])
    for batch in batches("toy", "float64")[:num_steps]:
        step(local_rows(_tensors(batch, torch.device("cpu")), rank, num_ranks))
    held_bytes = [parameter.untyped_storage().nbytes() for parameter in module.parameters()]
    for parameter, shard in zip(module.parameters(), shards, strict=False):
        full = torch.empty(num_ranks * len(shard), dtype=shard.dtype)
        dist.all_gather(list(full.chunk(num_ranks)), shard.detach())
        parameter.data = full[: parameter.numel()].view(parameter.shape)
    return to_numpy(module), held_bytes


def halve(buffer: torch.Tensor, group: Any) -> torch.Tensor:
    """A user's communication hook."""
    collectives.all_reduce(buffer, group)
    return buffer / 2


def train_module_on_rank(
    name: str, module: torch.nn.Module, optimizer: tuple[Any, dict[str, Any]], options: dict[str, Any],
    batches: Sequence[Arrays], *, num_microbatches: int = 1, autocast: bool = False,
) -> Arrays:  # fmt: skip
    """Trains a module of torch's own layers on this rank's rows; weights and running means by name."""

    def loss_fn(net: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = net(batch["x"])
        loss = torch.nn.functional.mse_loss if batch["y"].is_floating_point() else torch.nn.functional.cross_entropy
        return loss(out.to(torch.promote_types(out.dtype, torch.float32)), batch["y"])

    net, steps = make_training(name, module, optimizer[0], options, **optimizer[1])
    trainer = torchref.Trainer(loss_fn, steps, net, num_microbatches=num_microbatches)
    for batch in batches:
        trainer.step(local_rows(_tensors(batch, torch.device("cpu")), dist.get_rank(), dist.get_world_size()))
    means = {name: buffer for name, buffer in module.named_buffers() if "mean" in name}
    return {name: tensor.detach().numpy() for name, tensor in (net.gather_full_params() | means).items()}


def plans_on_rank(name: str, model: str, num_microbatches: Sequence[int]) -> tuple[Any, list[Any]]:
    """Name and size of each bucket's tensors, and the planned collectives, of a strategy as it is by default."""
    net, _ = make_training(name, build(model), torch.optim.SGD, {}, lr=0.1)
    buckets = [[(tensor.name, tensor.num_bytes) for tensor in bucket.tensors] for bucket in net.plan.buckets]
    return buckets, [net.planned_collectives(count) for count in num_microbatches]


def owners_on_rank(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The rank that ``ShardedOptimizer`` gives each parameter to."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = torchref.ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.1)
    return [optimizer.owner[parameter] for parameter in parameters]
