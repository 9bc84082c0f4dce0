"""Weights in one ``.npz`` or ``.safetensors`` file: an array per name, without pickle.

Names are dotted paths. For PyTorch, torchref included, export the arrays of ``interop.to_numpy``, which have the names
and layouts of a ``state_dict``:

    params = host_state.host_params(trainer, state)          in full on the host, and on no device
    export_weights("weights.npz", params)                    head.kernel [in, out]
    export_weights("weights.npz", to_numpy(params))          head.weight [out, in]

NumPy's format has no bfloat16 or smaller floats; they are written as float32, which holds them exactly. A name
that ends in ``.safetensors`` chooses that format, which has bfloat16 and two of 8 bits, and needs its package.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..arguments import check_leaves, check_path

SAFETENSORS = ".safetensors"
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "I8": "int8", "I16": "int16",
    "I32": "int32", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def export_weights(path: str | os.PathLike[str], params: Any) -> None:
    """Writes weights to a file, atomically.

    Args:
        path: The file, or a link to it; replaced if it exists. One that ends in ``.safetensors`` gets that format.
        params: A tree of arrays, or arrays by name.

    Raises:
        ValueError: If there are no arrays, two have the same name, the path is that of something else than a file, or
            safetensors is not installed, or does not know a dtype or name.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_weights(f"{folder}/weights.npz", {"head": {"kernel": np.ones((3, 5))}})
        ...     weights = load_weights(f"{folder}/weights.npz")
        >>> {name: array.shape for name, array in weights.items()}
        {'head.kernel': (3, 5)}
    """
    from ..tree import named_leaves  # late: torchref reads weights, and imports no JAX

    check_path("path", path)
    leaves = named_leaves(params)
    check_leaves("params", leaves)
    if not leaves:
        raise ValueError(f"params (={params!r}) must hold at least one array")
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"path (={str(path)!r}) must be a regular file, it is a folder or device")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        (_write_safetensors if path.suffix == SAFETENSORS else _write_npz)(partial, leaves)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the weights of a file, by name: of ``.npz`` in the order in which they were written.

    Args:
        path: The file; one that ends in ``.safetensors`` has that format.

    Raises:
        ValueError: If the file is truncated, or holds no weights, or safetensors is needed and not installed.
        OSError: If it cannot be read.
    """
    check_path("path", path)
    if Path(path).suffix == SAFETENSORS:
        return _read_safetensors(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy"): _read(archive, name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} must hold weights, it is truncated or another kind: {error}") from error


def _write_npz(path: Path, leaves: Mapping[str, Any]) -> None:
    # Not np.savez: it reserves some names, and pickles unknown types.
    with zipfile.ZipFile(path, "w") as archive:
        for name, leaf in leaves.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, as_native(np.asarray(leaf)), allow_pickle=False)


def _write_safetensors(path: Path, leaves: Mapping[str, Any]) -> None:
    safetensors = _import_safetensors()
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES.values():
            raise ValueError(f"leaf {name!r} (of {array.dtype.name}) must be of a dtype that safetensors has")
    if "__metadata__" in arrays:
        raise ValueError("leaf '__metadata__' must have another name, which safetensors does not use itself")
    safetensors.numpy.save_file(arrays, path)


def _read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    safetensors = _import_safetensors()
    try:
        found = safetensors.deserialize(Path(path).read_bytes())
        dtypes = {name: np.dtype(_DTYPES[tensor["dtype"]]) for name, tensor in found}
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(f"file {str(path)!r} must hold weights, it is truncated or another kind: {error}") from error
    return {name: np.frombuffer(one["data"], dtypes[name]).reshape(one["shape"]).copy() for name, one in found}


def _import_safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ValueError(
            "a .safetensors file needs the package safetensors: pip install 'jaxddp[safetensors]'"
        ) from error
    return safetensors


def _read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def as_native(array: np.ndarray) -> np.ndarray:
    """Widens floats that NumPy does not have, such as bfloat16, to float32, which holds them exactly."""
    if np.issubdtype(array.dtype, np.inexact):
        return array
    try:
        ml_dtypes.finfo(array.dtype)
    except ValueError:  # of no float
        return array
    return array.astype(np.float32)
