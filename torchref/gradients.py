"""Gradients of one rank, its shards, or what has become shards: what would take them for averages is refused.

``torch.nn.utils.clip_grad_norm_`` would compute the norm of one rank's, or find no gradient and clip nothing; a
``GradScaler`` would skip a step on some ranks only.
"""

from __future__ import annotations

from typing import Any

import torch

_NORMS = {torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm}
_LOOKS = {"__get__", "dim", "is_floating_point", "is_complex", "untyped_storage"}
_SCALERS = {torch._amp_foreach_non_finite_check_and_unscale_}


class PartialGradient(torch.Tensor):
    """A gradient of one rank alone, or of a shard. Its norm and a scaler's look are refused; results are plain."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NORMS:
            raise RuntimeError(
                "this would be the norm of this rank's part of the gradients: call clip_grad_norm_ or grad_norm of the"
                " wrapper after finish_gradient_synchronization"
            )
        if func in _SCALERS:
            raise RuntimeError(
                "a GradScaler looks at this rank's part of the gradients, and ranks would skip steps apart: train in"
                " bfloat16, or use BucketedDDP and scaler.unscale_ after finish_gradient_synchronization"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class SpentGradient(torch.Tensor):
    """Stands for a full gradient that was or is being reduced into shards, and is gone when that is cleared."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__repr__:
            return "SpentGradient()"
        if getattr(func, "__name__", "") not in _LOOKS:
            raise RuntimeError(
                "this gradient is reduced into the ranks' shards: call finish_gradient_synchronization after the"
                " backward, then call clip_grad_norm_ or grad_norm of the wrapper in place of torch's, or zero_grad()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def spent_gradient(parameter: torch.Tensor) -> SpentGradient:
    """A stand-in for the gradient of a parameter: of its shape, in the memory of one element."""
    return torch.Tensor._make_subclass(SpentGradient, parameter.detach().new_zeros(()).expand(parameter.shape))
