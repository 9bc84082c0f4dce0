"""What a deleted wrapper leaves behind: no hooks, but the shards that an FSDP made.

Sharding replaces parameters permanently, so the module keeps a record of their full shapes. A module with shards, or a
deep copy of it, is refused when it is wrapped again: shards of shards would silently train another function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_RECORD = "_full_shapes"  # in the module's own dict: deep copies include it, state_dicts do not


def remove_hooks_with(wrapper: nn.Module, handles: Sequence[RemovableHandle]) -> None:
    """Removes hooks when a wrapper is deleted."""
    for handle in handles:
        weakref.finalize(wrapper, handle.remove)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Makes a hook of a method: one that referenced its wrapper would keep model and buckets alive after both."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return hook


def record_full_shapes(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Records on a module that some of its parameters are shards."""
    module.__dict__[_RECORD] = {name: torch.Size(shape) for name, shape in shapes.items()}


def check_not_sharded(module: nn.Module) -> None:
    """Refuses a module that has shards for parameters.

    Raises:
        ValueError: If a parameter is a shard.

    Example:
        >>> module = nn.Linear(4, 2)
        >>> record_full_shapes(module, {"weight": (2, 4)})
        >>> check_not_sharded(module)
        >>> module.weight = nn.Parameter(torch.zeros(4))
        >>> check_not_sharded(module)
        Traceback (most recent call last):
            ...
        ValueError: parameter 'weight' (=[4]) must be full (=[2, 4]), not a shard made by FSDP: wrap a new module, ...
    """
    for path, one in module.named_modules():
        for name, shape in one.__dict__.get(_RECORD, {}).items():
            parameter = one._parameters.get(name)
            if parameter is not None and parameter.shape != shape:
                raise ValueError(
                    f"parameter {f'{path}.{name}'.lstrip('.')!r} (={list(parameter.shape)}) must be full"
                    f" (={list(shape)}), not a shard made by FSDP: wrap a new module, loaded with what"
                    " gather_full_params() returned before the FSDP was deleted"
                )
