"""The return value of a loss function, and the form in which the trainer uses it.

Ranks and micro-batches each see part of the batch, so every loss becomes a total and a weight, and is divided once:
loss = sum(total) / sum(weight). A plain mean has no weight: its sum is divided by the number of parts.
"""

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


def as_part(loss: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The total and the weight of what a loss function returned, scalars; no weight if all parts weigh the same."""
    total, weight = loss if isinstance(loss, Weighted) else (loss, None)
    for value in (total,) if weight is None else (total, weight):
        if not isinstance(value, torch.Tensor) or value.ndim:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"loss_fn returned {found}: the loss must be a scalar tensor or torchref.Weighted of two")
    if weight is not None and weight.requires_grad:
        raise ValueError("the weight of torchref.Weighted must not depend on parameters, or its gradient would be lost")
    return total, weight
