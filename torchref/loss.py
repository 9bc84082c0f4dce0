"""What a loss function may return, and the one form in which the trainer uses it.

Ranks and micro-batches each see part of the batch. A sum can be put together from parts, a mean cannot, so every loss
becomes a total and a weight, and the division happens once, after both have been summed over all parts:

    loss = sum(total) / sum(weight)        gradient = sum(d total / d params) / sum(weight)

A plain mean is a total whose weight is left out: all parts hold equally many examples, so its sum is divided by the
number of parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Weighted(NamedTuple):
    """A total and the weight it must be divided by, such as summed token losses and the number of tokens.

    Attributes:
        total: Sum over the examples at hand, a scalar.
        weight: Its weight, a scalar; 0 if nothing counts.
    """

    total: torch.Tensor
    weight: torch.Tensor


class Part(NamedTuple):
    """A summand: a total and its weight, None if every summand counts alike."""

    total: torch.Tensor
    weight: torch.Tensor | None


def as_part(loss: Any) -> Part:
    """Puts what a loss function returned into the trainer's form.

    Args:
        loss: A scalar tensor, the mean over the examples at hand, or ``Weighted``.

    Returns:
        The part.

    Raises:
        ValueError: If it is not a scalar.
    """
    for value in loss if isinstance(loss, Weighted) else (loss,):
        if not isinstance(value, torch.Tensor) or value.ndim != 0:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"loss_fn returned {found}: the loss must be a scalar tensor or torchref.Weighted of scalars"
            )
    return Part(*loss) if isinstance(loss, Weighted) else Part(loss, None)
