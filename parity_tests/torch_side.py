"""Training in PyTorch: with torchref's trainer on a rank, and in the plainest loop there is."""

from __future__ import annotations

import torch
import torch.distributed as dist

import torchref
from torchref.interop import from_numpy, to_numpy
from torchref.launch import RankPool
from torchref.models import build, loss_fn
from torchref.train import local_rows

from .cases import STRATEGIES, Case
from .inputs import Arrays, batches

# foreach and fused kernels round differently from the plain formula.
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9, foreach=False),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, foreach=False),
}


def train_on_rank(case: Case, weights: Arrays) -> Arrays:
    """Trains on this rank's share of every batch; runs in a rank process."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    module = build(case.model, seed=rank).to(device, getattr(torch, case.dtype))
    if rank == 0:  # the others start from weights of their own: the wrapper must replace them
        from_numpy(weights, module)
    strategy = STRATEGIES[case.strategy]
    net = torchref.make_strategy(strategy.name, module, **strategy.torch_options)
    trainer = torchref.Trainer(
        loss_fn,
        OPTIMIZERS[case.optimizer](_trainable(module)),
        net,
        num_microbatches=case.num_microbatches,
        max_grad_norm=case.max_grad_norm,
    )
    for batch in batches(case.model, case.dtype):
        trainer.step(local_rows(_tensors(batch, device), rank, case.num_ranks))
    return to_numpy(net.module)


def train(case: Case, weights: Arrays, ranks: RankPool) -> Arrays:
    """Trains on the case's ranks; all must end with the same bits."""
    results = ranks.run(train_on_rank, case, weights, num_ranks=case.num_ranks)
    for other in results[1:]:
        for name, weight in other.items():
            assert (weight == results[0][name]).all(), f"ranks differ in {name}"
    return results[0]


_finished: dict[tuple, Arrays] = {}


def train_on_one_process(case: Case, weights: Arrays) -> Arrays:
    """Trains on whole batches, without torchref's strategies and trainer; each reference is trained once."""
    key = (case.model, case.optimizer, case.dtype, case.max_grad_norm)
    if key not in _finished:
        _finished[key] = _train_plainly(*key, weights)
    return _finished[key]


def _train_plainly(model: str, optimizer: str, dtype: str, max_grad_norm: float | None, weights: Arrays) -> Arrays:
    module = from_numpy(weights, build(model).to(getattr(torch, dtype)))
    parameters = _trainable(module)
    tx = OPTIMIZERS[optimizer](parameters)
    for batch in batches(model, dtype):
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


def _trainable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _tensors(batch: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
