"""Units: modules whose parameters are full only while they are used.

Hooks put the full tensors in the place of the module's parameters before its forward, and remove them after it. What
autograd would save of them for the backward, views included, is replaced by a note that says which part of which tensor
it was. When the backward reads a note, the unit is gathered again. So a weight is gathered for the backward only if it
is needed: an embedding's is not, nor that of a first layer whose input needs no gradient. Inputs and outputs of the
forward may be of any structure, and activation checkpointing may run it again.

    before the forward   module.weight = Gather(shards)                 the graph saves notes only
    after                module.weight = shard again
    in the backward      gathered when the first note is read, dropped when the unit's gradients are reduced

Changes of the full tensors in place, which would be lost, are refused after the forward by their version counters. A
full tensor's ``data`` shares its counter, unlike that of other tensors.

Casts are not tracked: the copy of a weight that ``torch.autocast`` makes is saved as an activation. Use
``compute_dtype`` instead. As with all saved-tensor hooks, autograd does not detect in-place changes of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..hooks import record_full_shapes
from .gather import Gather, Shards


class Unit:
    """One module's parameters: sharded, or replicated and cast when used.

    Attributes:
        shards: The sharded parameters; None if there are none.
        needed_again: Whether the backward may need them.
        handles: Of the unit's hooks.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: Shards | None,
        replicated: dict[str, nn.Parameter],
        compute_dtype: torch.dtype | None,
    ) -> None:
        """Replaces the module's parameters by shards, and registers the hooks."""
        self.shards = shards
        self.needed_again = not isinstance(module, nn.Embedding)
        self._replicated = replicated
        self._compute_dtype = compute_dtype
        self._uses: list[tuple[torch.autograd.graph.saved_tensors_hooks | None, list[tuple[torch.Tensor, int]]]] = []
        if shards is not None:
            record_full_shapes(module, {name: spec.shape for name, spec in shards.specs.items()})
            for name, shard in shards.parameters.items():
                setattr(module, name, shard)
        # Bound methods, so that a deep copy of the module gets hooks bound to the copied unit.
        self.handles = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward, always_call=True),
        ]

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._uses.append((None, []))
        full_params = {name: _cast(parameter, self._compute_dtype) for name, parameter in self._replicated.items()}
        if self.shards is not None:
            full = Gather.apply(self.shards, *self.shards.parameters.values())
            full_params.update(zip(self.shards.parameters, full, strict=True))
        copies = [one for name, one in full_params.items() if one is not self._replicated.get(name)]
        for one in copies:
            one.__class__ = _Copy
        hooks = None
        if self.shards is not None and torch.is_grad_enabled():
            hooks = torch.autograd.graph.saved_tensors_hooks(_Packer(self.shards, full), _unpack)
            hooks.__enter__()
        self._uses[-1] = hooks, [(one, one._version) for one in copies if not one.is_inference()]
        module.__dict__.update(full_params)  # found before _parameters, which keeps the shards
        return (args, kwargs) if self._compute_dtype is None else _cast((args, kwargs), self._compute_dtype)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._uses:  # another hook raised before this unit's was called
            return
        hooks, copies = self._uses.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)
        for name in (*self._replicated, *(self.shards.parameters if self.shards is not None else ())):
            module.__dict__.pop(name, None)
        if any(one._version != version for one, version in copies):
            raise RuntimeError(
                f"the forward of {type(module).__name__} changed its parameters in place, in copies that are dropped"
                " after it: change parameters() after the step"
            )


class _Copy(torch.Tensor):
    """A full tensor that lives for a forward; what changes its ``data`` is noticed, as of any other alias."""

    # Results are plain tensors, as those of parameters.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()


class _Note(NamedTuple):
    """Saved by the graph in place of a full tensor or a view of it."""

    shards: Shards
    versions: tuple[int, ...]
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> torch.Tensor:
        full = self.shards.gather_again(self.versions)[self.name]
        return full.as_strided(self.size, self.stride, self.offset)


class _Foreign(NamedTuple):
    """An activation as packed by outer saved-tensor hooks, such as those of activation checkpointing."""

    kept: Any
    unpack: Callable[[Any], torch.Tensor]

    def read(self) -> torch.Tensor:
        return self.unpack(self.kept)


class _Packer:
    """Saved-tensor hook during a unit's forward: notes for the full tensors, other tensors as they are."""

    def __init__(self, shards: Shards, full: tuple[torch.Tensor, ...]) -> None:
        self._shards = shards
        self._versions = shards.versions
        self._names = {_place(one): name for name, one in zip(shards.parameters, full, strict=True)}
        # torch calls only the innermost saved-tensor hooks, and has no public way to find the outer ones.
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def __call__(self, tensor: torch.Tensor) -> Any:
        name = self._names.get(_place(tensor)) if tensor.layout == torch.strided and tensor.numel() else None
        if name is not None:
            offset = int(tensor.storage_offset())
            return _Note(self._shards, self._versions, name, tensor.size(), tensor.stride(), offset)
        if self._outer is None:
            return tensor
        pack, unpack = self._outer
        return _Foreign(pack(tensor), unpack)


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _unpack(kept: Any) -> torch.Tensor:
    return kept.read() if isinstance(kept, (_Note, _Foreign)) else kept


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Casts floating-point tensors, and those in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(one, dtype) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_cast(one, dtype) for one in value)
    return value
