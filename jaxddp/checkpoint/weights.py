"""Arrays in one ``.npz`` file, by name and without pickle: exported weights, and the states of checkpoints.

Names are dotted paths. For PyTorch, torchref included, export the arrays of ``interop.to_numpy``, which have the names
and layouts of a ``state_dict``. NumPy's format has no bfloat16 or smaller floats; weights are written as float32, which
holds them exactly.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import check_leaves, check_path


def export_weights(path: str | os.PathLike[str], params: Any) -> None:
    """Writes weights to a file, atomically.

    Args:
        path: The file, or a link to it; replaced if it exists.
        params: A tree of arrays, or arrays by name.

    Raises:
        ValueError: If there are no arrays, two have the same name, or the path is that of something else than a file.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_weights(f"{folder}/weights.npz", {"head": {"kernel": np.ones((3, 5))}})
        ...     weights = load_weights(f"{folder}/weights.npz")
        >>> {name: array.shape for name, array in weights.items()}
        {'head.kernel': (3, 5)}
    """
    import jax.numpy as jnp  # late: torchref reads weights, and imports no JAX

    from ..tree import named_leaves

    check_path("path", path)
    leaves = named_leaves(params)
    check_leaves("params", leaves)
    if not leaves:
        raise ValueError(f"params (={params!r}) must hold at least one array")
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"path (={str(path)!r}) must be a regular file, it is a folder or device")
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    for name, array in arrays.items():
        if jnp.issubdtype(array.dtype, jnp.inexact) and not np.issubdtype(array.dtype, np.inexact):  # of ml_dtypes
            arrays[name] = array.astype(np.float32)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write_arrays(partial, arrays)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the weights of a file, by name, in the order in which they were written.

    Raises:
        ValueError: If the file is truncated, or holds no weights.
        OSError: If it cannot be read.
    """
    check_path("path", path)
    try:
        return read_arrays(path)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} must hold weights, it is truncated or another kind: {error}") from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays; of dtypes that NumPy does not have, such as bfloat16, the bytes."""
    with zipfile.ZipFile(path, "w") as archive:  # np.savez reserves some names, and pickles unknown types
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_arrays(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Reads arrays, all if ``names`` is None; dtypes that NumPy does not have are those of their bytes."""
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()] if names is None else names
        arrays = {}
        for name in names:
            with archive.open(f"{name}.npy") as member:
                arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    return arrays
