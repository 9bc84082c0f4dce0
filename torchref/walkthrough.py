"""ZeRO on six parameters: what each of two ranks holds after each phase of a training step.

A ``Linear(2, 2)`` has a weight of 4 elements and a bias of 2. A rank owns half of each, 3 elements in all, and keeps
Adam's two moments of those only. The numbers are counted from a rank's tensors, not computed.

    python -m torchref.walkthrough

``ZeRO2`` holds the same, but never all 6 gradients: those of a bucket are freed during the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .communication.collectives import record
from .gradients import SpentGradient
from .launch import RankPool, launch
from .zero import ZeRO1

NUM_RANKS = 2


class Holding(NamedTuple):
    """What one rank holds after a phase, in elements."""

    phase: str
    rank: int
    parameters: int
    exp_avg: int
    exp_avg_sq: int
    gradients: int
    sent: str  # kinds of the collectives issued, each once


def walk(pool: RankPool | None = None) -> list[Holding]:
    """Takes two steps with ``ZeRO1`` and Adam: what each rank holds in the second, as the first makes the moments."""
    found = pool.run(_on_rank, num_ranks=NUM_RANKS) if pool else launch(_on_rank, num_ranks=NUM_RANKS)
    return [holding for of_phase in zip(*found, strict=True) for holding in of_phase]


def main() -> None:
    """Prints the table."""
    row = "{:<26} {:>4} {:>11} {:>8} {:>11} {:>10}  {}"
    print(row.format(*Holding._fields))
    for holding in walk():
        print(row.format(*holding).rstrip())


def _on_rank() -> list[Holding]:
    torch.manual_seed(0)
    net = ZeRO1(nn.Linear(2, 2), torch.optim.Adam, lr=0.1)
    x = torch.ones(1, 2) * (1 + dist.get_rank())
    phases: dict[str, Callable[[], Any]] = {
        "before": net.zero_grad,
        "backward": lambda: net(x).square().sum().backward(),
        "gradients synchronised": net.finish_gradient_synchronization,
        "own part updated, gathered": net.step,
    }
    for phase in phases.values():
        phase()
    holdings = []
    for name, phase in phases.items():
        with record() as issued:
            phase()
        states = net.optimizer.state.values()
        shards = (shard for shard, _ in net.local_shards().values())
        grads = [parameter.grad for parameter in (*net.parameters(), *shards)]
        holdings.append(
            Holding(
                name,
                dist.get_rank(),
                _num_elements(net.parameters()),
                _num_elements(state["exp_avg"] for state in states),
                _num_elements(state["exp_avg_sq"] for state in states),
                _num_elements(grad for grad in grads if not isinstance(grad, (SpentGradient, type(None)))),
                ", ".join(dict.fromkeys(one.kind for one in issued)),
            )
        )
    return holdings


def _num_elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


if __name__ == "__main__":
    main()
