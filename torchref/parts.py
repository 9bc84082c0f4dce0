"""Tensors of one rank alone, or of a part: a use that would take one for the whole or for an average is refused.

PartialGradient   a gradient of one rank alone, or of a shard: its norm would be another, or a rank skip a step alone
SpentGradient     stands for a gradient that is reduced into shards: torch's clipping would find none and clip nothing
HeldShard         what an optimizer updates of a parameter that is whole in the module: others must not change it
Shard             a parameter of which this rank holds a part: it answers as the whole would, or refuses

Of a shard, what is the same on a part is allowed: shapes and the like, and changes element by element, as an optimizer,
a moving average or a checkpoint makes them. Anything else (a product, a sum, a norm, a random fill, a hook) is refused.
In an optimizer's step its shards are plain parameters, of plain gradients.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .communication.sharding import Cut

_SCALER = "_amp_foreach_non_finite_check_and_unscale_"
_OF_ALL = {"item", "__bool__", "__float__", "__int__", "normalize", "_foreach_max", _SCALER}  # and what is a norm
_LOOKS = {"__get__", "dim", "is_floating_point", "is_complex", "untyped_storage"}
_SAME_ON_A_PART = set(
    """dim ndimension size numel nelement element_size is_floating_point is_complex stride is_contiguous storage_offset
    data_ptr untyped_storage get_device is_inference is_pinned _has_compatible_shallow_copy_type zeros_like ones_like
    full_like empty_like new_empty new_zeros type requires_grad_ __get__ __set__ __delete__ __repr__ __hash__ detach
    clone contiguous to cpu cuda float double half bfloat16 isfinite isnan""".split()
)
_ELEMENTWISE = set(
    """add sub mul div lerp addcmul addcdiv sqrt neg abs pow clamp maximum copy rsub true_divide subtract multiply fill
    zero minimum sign where equal __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __iadd__
    __isub__ __imul__ __itruediv__""".split()
)
_GRAD: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]


class CountsChanges:
    """A tensor whose counter of changes, its version, counts those of its ``data`` as well."""

    detach: Any

    @property
    def data(self) -> torch.Tensor:  # noqa: D102
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.detach().copy_(values)


class PartialGradient(CountsChanges, torch.Tensor):
    """A gradient of one rank alone or of a shard, or what was made of one; what sums one up, as a norm, is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        sums_up = name in _OF_ALL or name.endswith("norm")
        with torch._C.DisableTorchFunctionSubclass():
            found = None if sums_up else func(*args, **(kwargs or {}))
            if isinstance(found, (torch.Tensor, tuple, list)) and name != "as_subclass" and "_like" not in name:
                given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
                made = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor) and not one._is_view()]
                size = max(one.numel() for one in given if isinstance(one, cls))
                sums_up = "_foreach_" not in name and any(one.numel() < size for one in made)
                ids = {id(one) for one in given}  # changed in place
                found = tree_map_only(torch.Tensor, lambda one: one if id(one) in ids else one.as_subclass(cls), found)
        if sums_up:
            raise RuntimeError(
                "norms and scalers would see this rank's part of the gradients alone: call clip_grad_norm_ or grad_norm"
                " of the wrapper after finish_gradient_synchronization; a GradScaler needs BucketedDDP, or bfloat16"
            )
        return found


def mark_gradients(parameters: Iterable[Any], are_parts: bool) -> None:
    """Makes gradients partial, or plain, as in an optimizer's step."""
    for grad in [one.grad for one in parameters]:
        if type(grad) in (torch.Tensor, PartialGradient):
            grad.__class__ = PartialGradient if are_parts else torch.Tensor


class SpentGradient(torch.Tensor):
    """Stands for a full gradient that was or is being reduced into shards, and is gone when that is cleared."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__repr__:
            return "SpentGradient()"
        is_look = getattr(func, "__name__", "") in _LOOKS
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {})) if is_look else None
        if not is_look or isinstance(found, torch.Tensor):  # its data and its transpose would be zeros
            raise RuntimeError(
                "this gradient is reduced into the ranks' shards: call finish_gradient_synchronization after the"
                " backward, then call clip_grad_norm_ or grad_norm of the wrapper in place of torch's, or zero_grad()"
            )
        return found


def spent_gradient(parameter: torch.Tensor) -> SpentGradient:
    """A stand-in for the gradient of a parameter: of its shape, in the memory of one element."""
    return torch.Tensor._make_subclass(SpentGradient, parameter.detach().new_zeros(()).expand(parameter.shape))


class HeldShard(CountsChanges, nn.Parameter):
    """A rank's shard of a parameter whose weights are the module's, between steps."""


class Shard(torch.Tensor):
    """A parameter of which this rank holds a part, or what was made of one, such as ``shard.detach()``."""

    full_name: str  # of the parameter, in the wrapped module
    cut: Cut

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        base = name.removesuffix("_") if not name.endswith("__") else name
        with torch._C.DisableTorchFunctionSubclass():
            if name in {"__get__", "__set__"}:  # nearly all calls: reading a version, setting a gradient
                found = func(*args)
                if func == _GRAD or not isinstance(found, torch.Tensor):
                    return found
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            shard = next(one for one in tensors if isinstance(one, Shard))
            if base.removeprefix("_foreach_") in _ELEMENTWISE:
                fits = base.startswith("_foreach_") or all(one.shape == shard.shape or not one.ndim for one in tensors)
                if not fits or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors)):
                    shard._refuse(name)
            elif name not in _SAME_ON_A_PART:
                shard._refuse(name)
            result = func(*args, **kwargs)
            is_plain = "_like" in name or "new_" in name or any(result is one for one in tensors)
            if isinstance(result, torch.Tensor) and not is_plain:
                result = result.as_subclass(Shard)
                result.full_name, result.cut = shard.full_name, shard.cut
            return result

    def _refuse(self, use: str) -> NoReturn:
        raise RuntimeError(
            f"{use} of {self.full_name!r} would see this rank's shard (={list(self.shape)}) of {list(self.cut.shape)}:"
            " use it within its own module's forward, initialise it before, keep that module out of shard_types or add"
            " the one that uses it, decay weights in the optimizer, or take gather_full_params()"
        )


def make_shard(parameter: nn.Parameter, name: str, cut: Cut, rank: int) -> None:
    """Turns a full parameter into this rank's shard of it, in place: an optimizer made before still holds it."""
    with torch.no_grad():
        parameter.data = cut.local_shard(parameter.detach(), rank).clone()
    parameter.grad = None
    shard: Any = parameter
    shard.__class__ = Shard
    shard.full_name, shard.cut = name, cut
    shard._is_param = True  # isinstance(shard, nn.Parameter)
