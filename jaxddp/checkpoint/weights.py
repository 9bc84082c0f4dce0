"""Weights in one ``.npz`` file: an array per name, without pickle.

Names are dotted paths. For PyTorch, torchref included, export the arrays of ``interop.to_numpy``, which have the names
and layouts of a ``state_dict``:

    params = host_state.host_params(trainer, state)          in full on the host, and on no device
    export_weights("weights.npz", params)                    head.kernel [in, out]
    export_weights("weights.npz", to_numpy(params))          head.weight [out, in]

NumPy's format has no bfloat16 or smaller floats; they are written as float32, which holds them exactly.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..tree import named_leaves


def export_weights(path: str | os.PathLike[str], params: Any) -> None:
    """Writes weights to a file, atomically.

    Args:
        path: The file, or a link to it; replaced if it exists.
        params: A tree of arrays, or arrays by name.

    Raises:
        ValueError: If two leaves have the same name, or the path is that of something else than a file.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_weights(f"{folder}/weights.npz", {"head": {"kernel": jnp.ones((3, 5))}})
        ...     weights = load_weights(f"{folder}/weights.npz")
        >>> {name: array.shape for name, array in weights.items()}
        {'head.kernel': (3, 5)}
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"path (={str(path)!r}) must be a regular file, it is a folder or device")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        # Not np.savez: it reserves some names, and pickles unknown types.
        with zipfile.ZipFile(partial, "w") as archive:
            for name, leaf in named_leaves(params).items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, _as_native(np.asarray(leaf)), allow_pickle=False)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the weights of a file, by name, in the order in which they were written.

    Raises:
        ValueError: If the file is truncated, or holds no weights.
        OSError: If it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy"): _read(archive, name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} must hold weights, it is truncated or another kind: {error}") from error


def _read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _as_native(array: np.ndarray) -> np.ndarray:
    is_native = not jnp.issubdtype(array.dtype, jnp.floating) or np.issubdtype(array.dtype, np.floating)
    return array if is_native else array.astype(np.float32)
