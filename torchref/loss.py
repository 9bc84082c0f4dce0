"""The return value of a loss function, and the form in which the trainer uses it.

Ranks and micro-batches each see part of the batch. Sums over parts can be added, means cannot, so every loss becomes a
total and a weight, and is divided once: loss = sum(total) / sum(weight). A plain mean is a total without a weight: all
parts have equally many examples, so its sum is divided by the number of parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Weighted(NamedTuple):
    """A total and its weight, such as the sum of token losses and the number of tokens.

    Attributes:
        total: Sum over the batch's examples, a scalar.
        weight: Divides the total, a scalar, 0 or more; 0 if no example counts.
    """

    total: torch.Tensor
    weight: torch.Tensor


class Part(NamedTuple):
    """The loss of one part of the batch; its weight is None if all parts weigh the same."""

    total: torch.Tensor
    weight: torch.Tensor | None


def as_part(loss: Any) -> Part:
    """Converts the return value of a loss function.

    Raises:
        ValueError: If it is not a scalar, or its weight depends on parameters.
    """
    for value in loss if isinstance(loss, Weighted) else (loss,):
        if not isinstance(value, torch.Tensor) or value.ndim != 0:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"loss_fn returned {found}: the loss must be a scalar tensor or torchref.Weighted of scalars"
            )
    if isinstance(loss, Weighted) and loss.weight.requires_grad:
        raise ValueError("the weight of torchref.Weighted must not depend on parameters, or its gradient would be lost")
    return Part(*loss) if isinstance(loss, Weighted) else Part(loss, None)
