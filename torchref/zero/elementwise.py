"""Tests by running it whether an optimizer is element-wise, so that it may run on shards.

A rank's optimizer sees a flat part of each parameter. Its updates are those of the full parameter if each element's
update depends only on that element's gradient and state, and on numbers that are equal on all ranks. The test takes
some steps on a small matrix, and the same steps on its flat halves with an optimizer each, as two ranks would. Both
must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_NUM_STEPS = 3  # more than one: Adam's first step is the gradient's sign, whatever its size
_TOLERANCE = 1e-9  # of the largest movement, in float64: vectorised code may round the halves differently


def check_elementwise(
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    device: torch.device | str = "cpu",
) -> None:
    """Refuses an optimizer that would update shards differently from full parameters.

    Args:
        optimizer_cls: The optimizer.
        options: Its options, beside parameters.
        device: Where to run it.

    Raises:
        ValueError: If an update depends on more than the element, such as a norm or the parameter's shape, or if a step
            raises, because the optimizer needs a closure, matrices or sparse gradients.

    Example:
        >>> check_elementwise(torch.optim.AdamW, {"lr": 0.1})
        >>> check_elementwise(torch.optim.Adafactor, {"lr": 0.1})
        Traceback (most recent call last):
            ...
        ValueError: optimizer (=Adafactor) must be element-wise to be sharded: ... on the whole and on its parts
    """
    if "lr" in options:
        options = {**options, "lr": 1.0}  # a schedule may start at 0, where nothing moves
    name = getattr(optimizer_cls, "__name__", optimizer_cls)
    values = torch.cos(torch.arange(24.0, dtype=torch.float64, device=device))
    whole = nn.Parameter(values.reshape(4, 6).clone())
    parts = [nn.Parameter(part.clone()) for part in values.chunk(2)]
    optimizer = optimizer_cls([whole], **options)  # outside of the try: bad options raise the optimizer's own error
    try:
        _take_steps([optimizer], [whole])
        _take_steps([optimizer_cls([part], **options) for part in parts], parts)  # as on two ranks
    except Exception as error:  # of any kind: it is the optimizer's
        raise ValueError(
            f"optimizer (={name}) must be element-wise to be sharded: on a matrix and its parts it raises"
            f" {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    moved, moved_in_parts = (torch.cat([p.detach().reshape(-1) for p in one]) - values for one in ([whole], parts))
    if not (moved - moved_in_parts).abs().max() <= _TOLERANCE * moved.abs().max():
        raise ValueError(
            f"optimizer (={name}) must be element-wise to be sharded: its steps differ on the whole and on its parts"
        )


def _take_steps(optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter]) -> None:
    """Takes some steps on a matrix, or the same on its parts."""
    for step in range(_NUM_STEPS):
        grads = torch.sin((step + 1) * torch.arange(24.0, dtype=torch.float64, device=parameters[0].device))
        for optimizer, parameter, grad in zip(optimizers, parameters, grads.chunk(len(parameters)), strict=True):
            parameter.grad = grad.reshape(parameter.shape)
            optimizer.step()
