"""Copies parameters between a module and NumPy, under the names and layouts of its ``state_dict``.

A shared parameter is listed under each of its names. Values are copied bit for bit; a different dtype is refused, never
cast. bfloat16, which NumPy lacks, becomes ``ml_dtypes.bfloat16``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from jaxddp.checkpoint.weights import as_numpy


def to_numpy(module: nn.Module) -> dict[str, np.ndarray]:
    """Copies a module's ``state_dict`` to NumPy: fresh, writable, C-contiguous arrays by name, in its order."""
    return {name: as_numpy(tensor).copy(order="C") for name, tensor in module.state_dict().items()}


def from_numpy(arrays: Mapping[str, Any], module: nn.Module) -> nn.Module:
    """Loads arrays into a module, in place, and returns it: the inverse of ``to_numpy``.

    Args:
        arrays: NumPy arrays, JAX arrays or PyTorch tensors, by ``state_dict`` name. A shared parameter needs one of its
            names; if more are given, their values must be equal.
        module: The module to fill; unchanged if anything is refused.

    Raises:
        ValueError: If names, shapes or dtypes are not the module's, or the values given for a shared parameter differ.
    """
    tensors = module.state_dict(keep_vars=True)
    given = {name: as_numpy(array) for name, array in arrays.items()}
    sources: dict[torch.Tensor, str] = {}  # of those that are given, the first name
    faults = [f"unknown {name!r}" for name in given if name not in tensors]
    for name, tensor in tensors.items():
        if name not in given:
            continue
        found = f"{given[name].dtype} {given[name].shape}"
        wanted = f"{str(tensor.dtype).removeprefix('torch.')} {(*tensor.shape,)}"
        first = sources.setdefault(tensor, name)
        if found != wanted:
            faults.append(f"{name!r} is {found}, not {wanted}")
        elif name != first and given[name].tobytes() != given[first].tobytes():
            faults.append(f"{name!r} differs from {first!r}, to which it is tied")
    for name, tensor in tensors.items():
        if tensor not in sources:
            faults.append(f"missing {name!r}")
            sources[tensor] = name  # so that a shared one is missing once
    if faults:
        raise ValueError(f"arrays must have the names, shapes and dtypes of module: {'; '.join(faults)}")
    with torch.no_grad():
        for tensor, name in sources.items():
            array = given[name]
            is_bfloat16 = array.dtype.name == "bfloat16"
            copied = torch.from_numpy((array.view(np.int16) if is_bfloat16 else array).copy())  # it may be read-only
            tensor.copy_(copied.view(torch.bfloat16) if is_bfloat16 else copied)
    return module
