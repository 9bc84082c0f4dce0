"""Units: modules whose parameters are whole only while they are used.

A unit's hooks put the whole tensors in the module's place of the parameters before its forward, and take them away
after; nothing holds them then. What autograd would keep of them for the backward, or views of them, is not kept: a note
of which part of which tensor is, and when the backward asks for it, the unit is gathered again. So a weight is gathered
when the backward needs it and only if it does: an embedding's is not, nor that of a first layer whose input needs no
gradient. It makes no difference what goes in and comes out of a module's forward, nor whether it is run again by
activation checkpointing around it.

    before the forward   module.weight = Gather(shards)                 a note of it is all that the graph keeps
    after                module.weight = shard again
    in the backward      gathered again at the first note that is read, dropped when its gradients leave

A copy is not a part: what ``torch.autocast`` makes of a weight is an activation. Use ``compute_dtype`` instead. As
under all hooks for saved tensors, autograd does not notice if an activation that it keeps is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..hooks import note_whole
from .gather import Gather, Shards


class Unit:
    """A module's parameters: those in shards, and those that every rank has whole.

    Attributes:
        shards: Those in shards; None if there are none.
        needed_again: Whether the backward may need them.
        handles: Of its hooks.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: Shards | None,
        replicated: dict[str, nn.Parameter],
        compute_dtype: torch.dtype | None,
    ) -> None:
        """Puts the shards in the module's place of its parameters, and itself in its hooks.

        Args:
            module: The module.
            shards: Of its own parameters.
            replicated: Other parameters of its own, to be cast when used.
            compute_dtype: What floating-point arguments and parameters are cast to; as they are if None.
        """
        self.shards = shards
        self.needed_again = not isinstance(module, nn.Embedding)
        self._replicated = replicated
        self._compute_dtype = compute_dtype
        self._uses: list[torch.autograd.graph.saved_tensors_hooks | None] = []
        if shards is not None:
            note_whole(module, {name: spec.shape for name, spec in shards.specs.items()})
            for name, shard in shards.parameters.items():
                setattr(module, name, shard)
        # Bound methods: a deep copy of the module gets hooks of its own unit.
        self.handles = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward, always_call=True),
        ]

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._uses.append(None)
        whole = {name: _cast(parameter, self._compute_dtype) for name, parameter in self._replicated.items()}
        if self.shards is not None:
            full = Gather.apply(self.shards, *self.shards.parameters.values())
            whole.update(zip(self.shards.parameters, full, strict=True))
            if torch.is_grad_enabled():
                hooks = torch.autograd.graph.saved_tensors_hooks(_Packer(self.shards, full), _unpack)
                hooks.__enter__()
                self._uses[-1] = hooks
        module.__dict__.update(whole)  # found before _parameters, which keeps the shards
        return (args, kwargs) if self._compute_dtype is None else _cast((args, kwargs), self._compute_dtype)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._uses:  # another hook failed before this unit's was called
            return
        hooks = self._uses.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)
        for name in (*self._replicated, *(self.shards.parameters if self.shards is not None else ())):
            module.__dict__.pop(name, None)


class _Note(NamedTuple):
    """What the graph keeps of a whole tensor, or a view of it."""

    shards: Shards
    versions: tuple[int, ...]
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> torch.Tensor:
        whole = self.shards.gather_again(self.versions)[self.name]
        return whole.as_strided(self.size, self.stride, self.offset)


class _Foreign(NamedTuple):
    """What hooks outside of the unit, such as those of activation checkpointing, keep of an activation."""

    kept: Any
    unpack: Callable[[Any], torch.Tensor]

    def read(self) -> torch.Tensor:
        return self.unpack(self.kept)


class _Packer:
    """What the graph gets to keep, while a unit's forward lasts: notes of the whole tensors, all else as it is."""

    def __init__(self, shards: Shards, full: tuple[torch.Tensor, ...]) -> None:
        self._shards = shards
        self._versions = shards.versions
        self._names = {_place(one): name for name, one in zip(shards.parameters, full, strict=True)}
        # Hooks do not nest by themselves, only the innermost are asked; there is no public way to find the others.
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
