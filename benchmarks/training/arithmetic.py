"""The arithmetic of a training run, the same in both frameworks, set in both and never left to their defaults.

| dtype  | parameters, gradients, AdamW's moments | products of matrices       |
|--------|----------------------------------------|----------------------------|
| `f32`  | float32                                | float32                    |
| `tf32` | float32                                | TF32, summed in float32    |
| `bf16` | bfloat16                               | bfloat16                   |

By themselves JAX takes TF32 on GPUs that have it, and torch float32; ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`` and
``NVIDIA_TF32_OVERRIDE`` would overrule what is set here, so ranks do not inherit them.
"""

from __future__ import annotations

from typing import Any

DTYPES = ("f32", "tf32", "bf16")
OVERRIDES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
_OF_JAX = {"f32": "highest", "tf32": "TF32_TF32_F32", "bf16": None}


def check_dtype(dtype: str, kind: str) -> None:
    """Raises ValueError if ranks of a kind cannot compute so."""
    if dtype == "tf32" and kind != "gpus":
        raise ValueError(f"dtype (={dtype}) must be f32 or bf16 on CPUs: TF32 is an arithmetic of GPUs")


def param_bytes(dtype: str) -> int:
    """Bytes of a parameter, and of its gradient and each moment."""
    return 2 if dtype == "bf16" else 4


def set_in_jax(dtype: str, kind: str, params: Any) -> Any:
    """Sets the precision of products in this process, and gives the parameters in their dtype."""
    import warnings

    import jax
    import jax.numpy as jnp

    if kind == "gpus":
        jax.config.update("jax_default_matmul_precision", _OF_JAX[dtype])
    if dtype != "bf16":
        return params
    warnings.filterwarnings("ignore", "parameter .* is bfloat16")  # training stalls, and timings do not care
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def set_in_torch(dtype: str, module: Any) -> Any:
    """Sets the precision of products in this process, and gives the module in its dtype."""
    import torch

    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    return module.to(torch.bfloat16) if dtype == "bf16" else module
