"""Whether an optimizer may run on shards: whether it is element-wise, found by running it.

On a rank, a sharded optimizer sees a flat part of each parameter. Its updates are those of the whole if the update of
an element depends on that element's gradient and state alone, and on numbers that all ranks hold alike. No optimizer is
known by name: some steps are taken on a small matrix, and on its flat halves; the two must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_NUM_STEPS = 3  # the first of them can be alike by chance: Adam's is the gradient's sign, whatever its size
_TOLERANCE = 1e-9  # of the largest movement, in float64: vectorised code may round the halves differently


def check_elementwise(
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    device: torch.device | str = "cpu",
) -> None:
    """Refuses an optimizer that would compute something else on shards than on the whole.

    Args:
        optimizer_cls: The optimizer.
        options: What it is made with, beside parameters.
        device: Where to run it.

    Raises:
        ValueError: If an update depends on more than the element, such as on a norm, or on the parameter's shape.

    Example:
        >>> check_elementwise(torch.optim.AdamW, {"lr": 0.1})
        >>> check_elementwise(torch.optim.Adafactor, {"lr": 0.1})
        Traceback (most recent call last):
            ...
        ValueError: optimizer (=Adafactor) must be element-wise to be sharded: ... on the whole and on its parts
    """
    if "lr" in options:
        options = {**options, "lr": 1.0}  # a schedule may start from 0, where all optimizers are alike
    values = torch.cos(torch.arange(24.0, dtype=torch.float64, device=device))
    whole = [nn.Parameter(values.reshape(4, 6).clone())]
    parts = [nn.Parameter(part.clone()) for part in values.chunk(2)]
    movements = []
    for parameters in (whole, parts):
        optimizer = optimizer_cls(parameters, **options)
        for step in range(_NUM_STEPS):
            grads = torch.sin((step + 1) * torch.arange(24.0, dtype=torch.float64, device=device))
            for parameter, grad in zip(parameters, grads.chunk(len(parameters)), strict=True):
                parameter.grad = grad.reshape(parameter.shape)
            optimizer.step()
        movements.append(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]) - values)
    difference = (movements[0] - movements[1]).abs().max()
    if not difference <= _TOLERANCE * movements[0].abs().max():
        raise ValueError(
            f"optimizer (={getattr(optimizer_cls, '__name__', optimizer_cls)}) must be element-wise to be sharded: its"
            " steps differ on the whole and on its parts"
        )
