"""Converts parameters between a Flax tree and a PyTorch ``state_dict``, through NumPy and without importing PyTorch.

Names map by rule, for any module whose two versions name their parts alike. The parts of a leaf's path are joined with
dots; the last part decides the name and the layout:

    Flax                                       PyTorch
    kernel     [in, out]                       weight  [out, in]                Linear
    kernel     [*spatial, in / groups, out]    weight  [out, in / groups, *spatial]   Conv, 1 to 3 spatial dims
    embedding  [num, features]                 weight  [num, features]          Embed
    scale      [features]                      weight  [features]               LayerNorm, RMSNorm, GroupNorm
    anything else                              the same name and layout         bias, custom parameters

``ConvTranspose``, ``LinearGeneral`` and ``MultiHeadAttention`` have other layouts and are not supported. A parameter
that PyTorch lists twice has one name here. Values are copied bit for bit; bfloat16 is that of ``ml_dtypes``.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..tree import named_leaves
from .weights import as_numpy

_RENAMED = {"kernel": "weight", "embedding": "weight", "scale": "weight"}


def to_numpy(params: Any) -> dict[str, np.ndarray]:
    """Converts a Flax tree to arrays with the names and layouts of a PyTorch ``state_dict``.

    Gives fresh, writable, C-contiguous arrays in the order of ``params``, such as ``nnx.state(module, nnx.Param)``.
    Raises a ValueError if two leaves map to one name.
    """
    leaves = torch_leaves(params).items()
    return {name: np.array(np.transpose(np.asarray(leaf), dims), order="C") for name, (dims, leaf) in leaves}


def from_numpy(arrays: Mapping[str, Any], like: Any) -> Any:
    """Converts the arrays of a PyTorch ``state_dict`` to a Flax tree: the inverse of ``to_numpy``.

    ``arrays`` of any framework are copied; ``like`` is a tree of arrays or ``jax.ShapeDtypeStruct``. Raises a
    ValueError that names all names, shapes and dtypes which differ, or as ``to_numpy``.
    """
    leaves = torch_leaves(like)
    given = {name: as_numpy(array) for name, array in arrays.items()}
    found = {name: f"{array.dtype} {array.shape}" for name, array in given.items()}
    wanted = {  # in the dtypes that JAX keeps: no float64 without x64
        name: f"{jax.dtypes.canonicalize_dtype(leaf.dtype)} {(*(leaf.shape[dim] for dim in dims),)}"
        for name, (dims, leaf) in leaves.items()
    }
    both = {name: (found.get(name, "missing"), wanted.get(name, "wanted")) for name in wanted | found}
    if faults := [f"{name!r} is {one}, not {other}" for name, (one, other) in both.items() if one != other]:
        raise ValueError(f"arrays must have the names, shapes and dtypes of like: {'; '.join(faults)}")
    # A copy: jax.device_put would share NumPy's memory on the CPU, and torch updates its tensors in place.
    new = [jnp.array(np.transpose(given[name], np.argsort(dims)), copy=True) for name, (dims, _) in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like), new)


def torch_leaves(params: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """By PyTorch's name, the Flax dims in the order of PyTorch's layout, and the leaf; in the order of the tree."""
    leaves: dict[str, tuple[tuple[int, ...], Any]] = {}
    for path, leaf in named_leaves(params).items():
        last, dims = path.rpartition(".")[2], tuple(range(len(leaf.shape)))
        name = path.removesuffix(last) + _RENAMED.get(last, last)
        if name in leaves:
            raise ValueError(f"{path!r} and another leaf have the name {name!r} in PyTorch")
        leaves[name] = (*dims[:-3:-1], *dims[:-2]) if last == "kernel" else dims, leaf
    return leaves
