"""The file of a checkpoint: a ZIP archive of NumPy arrays, as ``numpy.savez`` writes them, and a description in JSON.

Nothing is pickled. The archive has a checksum of each entry, and ``check`` reads all of them before any is used.
Tensors of dtypes that NumPy lacks, such as bfloat16, are stored as integers of their bits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jaxddp.checkpoint.folder import DamagedError

FORMAT = 1
"""Of the checkpoints that this version writes; it reads all up to it."""

PARTIAL = "torchref-partial"
"""How the name of a file ends while it is written."""

_MOST_ABOUT_BYTES = 2**28
_KINDS = {
    "format": int, "step": int, "strategy": str, "num_ranks": int, "optimizer": str, "state_has": dict, "numbers": dict,
    "elementwise": list, "dtypes": dict,
}  # fmt: skip


def write(path: Path, about: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes a checkpoint under another name, and renames it when it is on the disk.

    ``about`` is its description, JSON; the tensors are by name, on the host.

    Raises:
        OSError: If it cannot be written; no partial file is left.
    """
    partial = path.with_suffix(f".{PARTIAL}")
    try:
        with open(partial, "xb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                _write_array(archive, "about", np.frombuffer(json.dumps(about).encode(), np.uint8))
                for name, tensor in tensors:
                    _write_array(archive, name, _array_of(tensor))
            file.flush()
            os.fsync(file.fileno())  # the name must not be on the disk before what it names
        partial.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # a full disk must not stay full
        raise


def check(path: Path, *, with_tensors: bool = True) -> dict[str, Any]:
    """Compares all checksums of a checkpoint, or that of its description alone.

    Returns:
        The description.

    Raises:
        DamagedError: If one is wrong, or this is no checkpoint.
        OSError: If the file cannot be read.
    """
    try:
        if not path.is_file():
            raise ValueError("a pipe would be read for ever")
        with zipfile.ZipFile(path) as archive:
            if with_tensors and (name := archive.testzip()):
                raise ValueError(f"checksum of {name}")
            if archive.getinfo("about.npy").file_size > _MOST_ABOUT_BYTES:
                raise ValueError("too large")
            about = json.loads(_read_array(archive, "about").astype(np.uint8).tobytes())
            if not all(type(about[name]) is kind for name, kind in _KINDS.items()):
                raise ValueError("another description")
            names = set(archive.namelist())
            if missing := [name for name in about["dtypes"] if f"{name}.npy" not in names]:
                raise ValueError(f"without {missing[0]}")
            for name in about["dtypes"].values():
                if not isinstance(getattr(torch, name, None), torch.dtype):
                    raise ValueError(f"no dtype {name}")
            return about
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a place before the file's start
            raise
        raise DamagedError(str(error)) from error
    except MemoryError:
        raise
    except Exception as error:  # ZIP has many ways to be wrong: encrypted, compressed in unknown ways, cut
        raise DamagedError(str(error)) from error


class Reader:
    """Reads the tensors of a checkpoint that ``check`` has passed, one at a time; a context manager."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._archive, self._dtypes = zipfile.ZipFile(path), about["dtypes"]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def names(self, kind: str) -> list[str]:
        """The names of the tensors of a kind, such as ``params``, without it."""
        return [name.removeprefix(f"{kind}.") for name in self._dtypes if name.startswith(f"{kind}.")]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        with self._archive.open(f"{name}.npy") as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return read(member)[0]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return getattr(torch, self._dtypes[name])

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor."""
        return torch.from_numpy(_read_array(self._archive, name)).view(self.dtype(name))


def _write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    # Not np.savez: it reserves some names, and pickles unknown types.
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):  # the checksum is compared at the end
            raise ValueError("more than an array")
        return array


def _array_of(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor; the bits of one whose dtype NumPy lacks."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.contiguous().view(getattr(torch, f"int{8 * tensor.itemsize}")).numpy()
