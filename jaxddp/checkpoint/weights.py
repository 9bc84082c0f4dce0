"""Arrays in one ``.npz`` file, by name and without pickle: the states of checkpoints, and weights that others wrote.

``np.savez(path, **interop.to_numpy(params))`` writes weights under the names and in the layouts of a ``state_dict``.
"""

import os
import zipfile
from collections.abc import Iterable

import numpy as np


def load_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the weights of a file, by name, in the order in which they were written; a ValueError if it has none."""
    try:
        return read_arrays(path)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} must hold weights, it is truncated or another kind: {error}") from error


def read_arrays(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Reads arrays, all if ``names`` is None; dtypes that NumPy does not have, such as bfloat16, are their bytes."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist() if names is None else [f"{name}.npy" for name in names]:
            with archive.open(name) as member:
                arrays[name.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
    return arrays
