"""What a deleted wrapper leaves behind: none of its hooks, and of the parameters that it sharded, the shards.

Sharding replaces a module's parameters for good. The module keeps a note of the whole ones' shapes, so that it, or a
deep copy of it, is refused when it is wrapped again: shards of shards would train another function without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_NOTE = "_whole_shapes"  # in the module's own dict: a deep copy has it, and no state_dict does


def remove_with(wrapper: nn.Module, handles: Sequence[RemovableHandle]) -> None:
    """Removes hooks when a wrapper is deleted.

    Args:
        wrapper: Which is not kept alive, nor is what the hooks are on.
        handles: Of its hooks.
    """
    weakref.finalize(wrapper, _remove, handles)


def note_whole(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Notes on a module that parameters of its own are in shards.

    Args:
        module: The module.
        shapes: Of the whole parameters, by name within the module.
    """
    module.__dict__[_NOTE] = {name: torch.Size(shape) for name, shape in shapes.items()}


def check_whole(module: nn.Module) -> None:
    """Refuses a module with shards for parameters.

    Args:
        module: What is to be wrapped. Parameters that were replaced by whole ones since are whole.

    Raises:
        ValueError: If a parameter is a shard.

    Example:
        >>> module = nn.Linear(4, 2)
        >>> note_whole(module, {"weight": (2, 4)})
        >>> check_whole(module)
        >>> module.weight = nn.Parameter(torch.zeros(4))
        >>> check_whole(module)
        Traceback (most recent call last):
            ...
        ValueError: parameter 'weight' (=[4]) must be whole (=[2, 4]), not the shard that an FSDP made of it: wrap a ...
    """
    for path, one in module.named_modules():
        for name, shape in one.__dict__.get(_NOTE, {}).items():
            parameter = one._parameters.get(name)
            if parameter is not None and parameter.shape != shape:
                raise ValueError(
                    f"parameter {f'{path}.{name}'.lstrip('.')!r} (={list(parameter.shape)}) must be whole"
                    f" (={list(shape)}), not the shard that an FSDP made of it: wrap a new module, loaded with what"
                    " gather_full_params() gives before the FSDP is deleted"
                )


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
