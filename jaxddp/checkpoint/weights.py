"""Weights in one ``.npz`` file, by name, as ``np.savez(path, **interop.to_numpy(params))`` writes them."""

import os
import zipfile

import numpy as np


def load_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the weights of a file, by name, in the order in which they were written; a ValueError if it has none."""
    try:
        with open(path, "rb") as file, np.load(file) as archive:
            return dict(archive)
    except (zipfile.BadZipFile, ValueError, TypeError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} must hold weights, it is truncated or another kind: {error}") from error
