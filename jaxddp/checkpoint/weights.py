"""Arrays of any library in NumPy. Both packages use this file; it imports torch for a tensor of torch's alone."""

from typing import Any

import ml_dtypes
import numpy as np


def as_numpy(array: Any) -> np.ndarray:
    """A NumPy view or copy of an array or a PyTorch tensor."""
    if not hasattr(array, "detach"):
        return np.asarray(array)
    tensor = array.detach().cpu()
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy()
    import torch  # whose tensor it is

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
