"""Gradients of one rank, its shards, or what has become shards: what would take them for averages is refused.

``torch.nn.utils.clip_grad_norm_`` would compute the norm of one rank's, or find no gradient and clip nothing; a
``GradScaler`` would skip a step on some ranks only.
"""

from __future__ import annotations

from typing import Any

import torch

_NORMS = {torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm}
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


class ResumedGradient(PartialGradient):
    """A gradient that was added where a ``SpentGradient`` stood: nobody has cleared that."""


class SpentGradient(torch.Tensor):
    """Stands where a full gradient was until it was reduced into shards, and is gone when that gradient is cleared.

    Autograd adds to it as to a zero, and the type of the sum tells that it stood there. It has no elements.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__repr__:
            return "SpentGradient()"
        if func is torch.Tensor.untyped_storage:  # for whoever counts what tensors hold
            return torch.UntypedStorage(0)
        if getattr(func, "__name__", "") not in ("__get__", "dim", "is_floating_point", "is_complex"):
            raise RuntimeError(
                "this gradient was reduced into the ranks' shards: call clip_grad_norm_ or grad_norm of the wrapper"
                " after finish_gradient_synchronization, or zero_grad() before other uses"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Adds to it, which autograd does past ``__torch_function__``; anything else is a bug."""
        assert func is torch.ops.aten.add.Tensor and isinstance(args[1], SpentGradient), func
        return args[0].clone().as_subclass(ResumedGradient)


def spent_gradient(parameter: torch.Tensor) -> SpentGradient:
    """A stand-in for the gradient of a parameter, of its shape and without elements."""
    indices = torch.empty(parameter.dim(), 0, dtype=torch.int64, device=parameter.device)
    empty = torch.sparse_coo_tensor(indices, parameter.new_empty(0), parameter.shape, check_invariants=True)
    return torch.Tensor._make_subclass(SpentGradient, empty)
