"""Gradients of one rank, its shards, or what has become shards: what would take them for averages is refused.

``torch.nn.utils.clip_grad_norm_`` would compute the norm of one rank's, or find no gradient and clip nothing.
"""

from __future__ import annotations

from typing import Any

import torch

_NORMS = {
    torch._foreach_norm,
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    torch.Tensor.norm,
}

_Tensor: Any = torch.Tensor
# What ``nn.Module.to`` and its like do with a gradient.
_CASTS = {getattr(_Tensor, name) for name in ("to", "cpu", "cuda", "half", "float", "double", "bfloat16")}
_CASTS.add(_Tensor.data.__set__)
_FREE = {
    *(_Tensor.dim, _Tensor.is_floating_point, _Tensor.is_complex, _Tensor._version.__get__),
    torch._has_compatible_shallow_copy_type,
}


class PartialGradient(torch.Tensor):
    """A gradient of one rank alone, or of a shard. Only its norm is refused; results are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NORMS:
            raise RuntimeError(
                "this would be the norm of this rank's part of the gradients: call clip_grad_norm_ or grad_norm of the"
                " wrapper after finish_gradient_synchronization"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class SpentGradient(torch.Tensor):
    """Stands where a full gradient was until it was reduced into shards, and is gone when that gradient is cleared.

    Autograd adds to it as to a zero. Of the sum the type tells that it stood there: a ``PartialGradient``.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses functions of torch.

        Raises:
            RuntimeError: Unless it is printed, asked for its version or storage, or its module is cast or moved.
        """
        if func is torch.Tensor.__repr__:
            return "SpentGradient()"
        if func is torch.Tensor.untyped_storage:  # for whoever counts what tensors hold
            return torch.UntypedStorage(0)
        if func in _CASTS:
            return args[0]
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            "this gradient was reduced into the ranks' shards: call clip_grad_norm_ or grad_norm of the wrapper after"
            " finish_gradient_synchronization, or zero_grad() before other uses"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Adds to it, which autograd does past ``__torch_function__``; anything else is a bug."""
        assert func is torch.ops.aten.add.Tensor and isinstance(args[1], SpentGradient), func
        return args[0].clone().as_subclass(PartialGradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> SpentGradient:
        return self


def spent_gradient(parameter: torch.Tensor) -> SpentGradient:
    """A stand-in for the gradient of a parameter, of its shape and without elements."""
    indices = torch.empty(parameter.dim(), 0, dtype=torch.int64, device=parameter.device)
    empty = torch.sparse_coo_tensor(indices, parameter.new_empty(0), parameter.shape, check_invariants=True)
    return torch.Tensor._make_subclass(SpentGradient, empty)
