"""A parameter of which this rank holds a part: it answers as the whole would, or refuses.

What is the same on a part is allowed: shapes and the like, and changes element by element, as an optimizer, a moving
average or a checkpoint makes them. Anything else (a product, a sum, a norm, a random fill, a hook) would see a part in
place of the whole, so it names the parameter and the way out. In an optimizer's step its shards are plain parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..communication.sharding import Cut

_SAME_ON_A_PART = set(
    """dim ndimension size numel nelement element_size is_floating_point is_complex stride is_contiguous storage_offset
    data_ptr untyped_storage get_device is_inference is_pinned _has_compatible_shallow_copy_type zeros_like ones_like
    empty_like new_empty new_zeros type requires_grad_ __get__ __set__ __delete__ __repr__ __hash__ detach clone
    contiguous to cpu cuda float double half bfloat16 isfinite isnan""".split()
)
_ELEMENTWISE = set(
    """add sub mul div lerp addcmul addcdiv sqrt neg abs pow clamp maximum copy rsub true_divide subtract multiply fill
    zero minimum sign where equal __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __iadd__
    __isub__ __imul__ __itruediv__""".split()
)
_Tensor: Any = torch.Tensor
_GRAD = _Tensor.grad.__get__


class ShardTensor(torch.Tensor):
    """What was made of a shard, such as ``shard.detach()``: still a part."""

    full_shape: torch.Size
    full_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_a_part(func, args, kwargs or {})


class Shard(nn.Parameter):
    """A parameter of which this rank holds a part.

    Attributes:
        full_name: Of the parameter, in the wrapped module.
        cut: How the full parameter is cut.
    """

    full_name: str
    cut: Cut

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""
        return self.cut.shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_a_part(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        refuse(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse(self, "pickle")


def make_shard(parameter: nn.Parameter, name: str, cut: Cut, rank: int) -> None:
    """Turns a full parameter into this rank's shard of it, in place: an optimizer made before still holds it."""
    with torch.no_grad():
        parameter.data = cut.local_shard(parameter.detach(), rank).clone()
    parameter.grad = None
    shard: Any = parameter
    shard.__class__ = Shard
    shard.full_name, shard.cut = name, cut


def refuse(shard: Any, use: str) -> Any:
    """Refuses a use of a shard, by a RuntimeError that names the parameter."""
    raise RuntimeError(
        f"{use} of {shard.full_name!r} would see this rank's shard (={list(shard.shape)}) of {list(shard.full_shape)}:"
        " use the parameter within its own module's forward, or keep its module out of shard_types, or add to them the"
        " one that uses it; gather_full_params(), called on every rank, gives the whole; initialise before; for"
        " a penalty the optimizer has weight_decay"
    )


def _on_a_part(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", str(func))
    base = name.removesuffix("_") if not name.endswith("__") else name
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        shard: Any = next(one for one in tensors if isinstance(one, (Shard, ShardTensor)))
        if base.removeprefix("_foreach_") in _ELEMENTWISE:
            fits = base.startswith("_foreach_") or all(one.shape == shard.shape or not one.ndim for one in tensors)
            if not fits or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors)):
                refuse(shard, name)
        elif name not in _SAME_ON_A_PART:
            refuse(shard, name)
        result = func(*args, **kwargs)
        is_plain = func == _GRAD or "_like" in name or "new_" in name or any(result is one for one in tensors)
        if isinstance(result, torch.Tensor) and not is_plain:
            result = result.as_subclass(ShardTensor)
            result.full_name, result.full_shape = shard.full_name, shard.full_shape
        return result
