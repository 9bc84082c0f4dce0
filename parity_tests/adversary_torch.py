"""Random lives of torchref's wrappers, against one process: every rank ends with the right weights, or is refused.

A life is a sequence of operations on a wrapped module. The reference, on the same rank, has the whole batch of each
pass and adds up what torch would: gradients of passes, divided by a synchronisation, used by a step, cleared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import torchref

WRAPPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "naive": (torchref.NaiveDDP, {}),
    "flat": (torchref.FlatDDP, {}),
    "overlapped": (torchref.OverlappedDDP, {}),
    "bucketed": (torchref.BucketedDDP, {"bucket_mb": 1e-4}),
    "zero1": (torchref.ZeRO1, {"bucket_mb": 1e-4}),
    "zero2": (torchref.ZeRO2, {"bucket_mb": 1e-4}),
    "zero2 full": (torchref.ZeRO2, {"accumulate": "full"}),
    "zero3": (torchref.FSDP, {}),
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
}
# What may come beside passes, synchronisations and steps in their order, and how often.
EVENTS = (
    *("drop", "failure", "look", "evaluate", "freeze", "unfreeze", "extra finish", "step too early"),
    *("clear", "clear by optimizer"),
)
ATOL = 1e-12


def draw(seed: int) -> tuple[str, str, int, list[str]]:
    """Draws a wrapper, an optimizer, a number of ranks and a sequence of operations."""
    rng = np.random.default_rng(seed)
    wrapper, optimizer = str(rng.choice(list(WRAPPERS))), str(rng.choice(list(OPTIMIZERS)))
    life: list[str] = []
    for _ in range(int(rng.integers(2, 5))):
        life.append(str(rng.choice(["clear", "clear by optimizer"], p=[0.7, 0.3])))
        for _ in range(int(rng.integers(0, 3))):
            life.append("quiet pass")
        life += ["pass", "finish", "step"]
    for _ in range(int(rng.integers(0, 3))):
        life.insert(int(rng.integers(len(life) + 1)), str(rng.choice(EVENTS)))
    num_ranks = int(rng.choice([1, 2, 2, 3]))
    if num_ranks == 1:  # whose gradients need no other's: no step is too early
        life = [operation for operation in life if operation != "step too early"]
    return wrapper, optimizer, num_ranks, life


def describe(seed: int) -> str:
    """Says a case in one line."""
    wrapper, optimizer, num_ranks, life = draw(seed)
    return f"torch seed {seed}: {wrapper} on {num_ranks}, {optimizer}: {', '.join(life)}"


def check_on_rank(seed: int) -> str | None:
    """Lives a life on this rank.

    Returns:
        What is wrong, in one line; None if the weights are right, or it was refused where it may be.
    """
    name, optimizer, num_ranks, life = draw(seed)
    is_plain = not set(life) & set(EVENTS[:-2]) and _is_in_order(life)
    run = _Run(seed, name, optimizer, num_ranks)
    try:
        for operation in life:
            run.do(operation)
            if operation == "step" and (wrong := run.difference()):
                return wrong
    except AssertionError as error:
        return str(error)
    except (RuntimeError, ValueError) as error:
        if "\n" in str(error):
            return f"refused in more than a line: {error}"
        return f"refused: {error}" if is_plain else None
    return None


def _is_in_order(life: list[str]) -> bool:
    kept = ["clear" if one == "clear by optimizer" else one for one in life]
    return all(
        before in allowed
        for before, one in zip(["step", *kept], kept, strict=False)
        for allowed in [
            {"clear": ("step",), "finish": ("pass",), "step": ("finish",)}.get(one, ("clear", "quiet pass"))
        ]
    )


class _Model(nn.Module):
    """Linear layers that FSDP shards, a norm that it does not, and a layer of which nothing is used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down, self.unused = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


class _Run:
    """A wrapped module, and its reference."""

    def __init__(self, seed: int, name: str, optimizer: str, num_ranks: int) -> None:
        self.rng, self.num_ranks, self.rank = np.random.default_rng((seed, 1)), num_ranks, dist.get_rank()
        torch.manual_seed(seed)
        self.reference = _Model().double()
        module = _Model().double()
        module.load_state_dict(self.reference.state_dict())
        cls, options = OPTIMIZERS[optimizer]
        wrapper, wrapper_options = WRAPPERS[name]
        owns = name.startswith("zero") and name != "zero3"
        options = {**options, "foreach": False}
        wrapper_options = {**wrapper_options, "optimizer_cls": cls, **options} if owns else wrapper_options
        self.net = wrapper(module, **wrapper_options)
        self.optimizer = self.net if owns else cls(self.net.parameters(), **options)
        self.reference_optimizer = cls(self.reference.parameters(), **options)
        self.pending: list[
            Any
        ] = []  # of passes that no synchronisation has followed: the batch, whether up was trained
        self.has_strayed = False  # by a step on gradients of this rank alone, to be refused at the next forward

    def do(self, operation: str) -> None:
        """Does one operation on both sides."""
        getattr(self, "_" + operation.replace(" ", "_"))()

    def difference(self) -> str | None:
        """Compares the weights."""
        if self.has_strayed:
            return None
        found, right = self.net.gather_full_params(), dict(self.reference.named_parameters())
        furthest = max(float((found[name] - right[name]).detach().abs().max()) for name in right)
        return None if furthest <= ATOL else f"weights are {furthest:.1e} off"

    def _rows(self) -> list[torch.Tensor]:
        return [torch.from_numpy(self.rng.normal(size=(2, 3))) for _ in range(self.num_ranks)]

    def _pass(self) -> None:
        rows = self._rows()
        loss = self.net(rows[self.rank]).square().sum()
        if self.has_strayed:
            raise AssertionError("a step on gradients of one rank was not refused at the next forward")
        loss.backward()
        self.pending.append((rows, self.net.module.up.weight.requires_grad))

    def _quiet_pass(self) -> None:
        with self.net.no_sync():
            self._pass()

    def _finish(self) -> None:
        self.net.finish_gradient_synchronization()
        is_trained = self.reference.up.weight.requires_grad
        for rows, was_trained in self.pending:
            self.reference.up.requires_grad_(was_trained)
            total: Any = sum(self.reference(x).square().sum() for x in rows)
            (total / self.num_ranks).backward()
        self.pending = []
        self.reference.up.requires_grad_(is_trained)
        for parameter in self.reference.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _step(self) -> None:
        self.optimizer.step()
        if self.pending:
            self.has_strayed = True
        else:
            self.reference_optimizer.step()

    def _clear(self) -> None:
        self.net.zero_grad()
        self.reference_optimizer.zero_grad()
        self.pending = []

    def _clear_by_optimizer(self) -> None:
        self.optimizer.zero_grad()
        self.reference_optimizer.zero_grad()
        self.pending = []

    def _drop(self) -> None:
        self._pass()
        self._clear_by_optimizer()

    def _failure(self) -> None:
        x = self._rows()[self.rank].requires_grad_()
        try:
            self.net(_Fails.apply(x)).sum().backward()
        except ZeroDivisionError:
            pass
        self._clear()

    def _look(self) -> None:
        self.net(self._rows()[self.rank])

    def _evaluate(self) -> None:
        with torch.no_grad():
            self._look()

    def _freeze(self) -> None:
        self.net.module.up.requires_grad_(False)

    def _unfreeze(self) -> None:
        self.net.module.up.requires_grad_(True)

    def _extra_finish(self) -> None:
        self._finish()

    def _step_too_early(self) -> None:
        self._pass()
        self._step()
