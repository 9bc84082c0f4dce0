"""Weights in NumPy, also from a file. Both packages use this; it imports torch for a tensor of torch's alone."""

import os
import zipfile
import zlib
from typing import Any

import ml_dtypes
import numpy as np


def load_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads what ``np.savez(path, **interop.to_numpy(params))`` wrote; a ValueError if it is damaged."""
    try:
        with open(path, "rb") as file, np.load(file) as archive:
            return dict(archive)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, TypeError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} must hold weights, it is truncated or another kind: {error}") from error


def as_numpy(array: Any) -> np.ndarray:
    """A NumPy view or copy of an array or a PyTorch tensor."""
    if not hasattr(array, "detach"):
        return np.asarray(array)
    tensor = array.detach().cpu()
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy()
    import torch  # whose tensor it is

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
