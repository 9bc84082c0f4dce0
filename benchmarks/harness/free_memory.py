"""Free memory for ranks, checked before they start: the system kills processes that exceed it without a message."""

from __future__ import annotations

from jaxddp.environment import free_memory_bytes, gpus

PROCESS_BYTES = 2**29  # a rank's process with both frameworks loaded


def free_bytes(kind: str) -> int:
    """Free memory for ranks of a kind: of the machine and its container, or of the fullest GPU.

    Raises:
        ValueError: If there are GPUs and no ``nvidia-smi`` to ask; CUDA itself would start a context in this process.
    """
    if kind != "gpus":
        return free_memory_bytes()
    if not (found := gpus()):
        raise ValueError("nvidia-smi must be installed and work: it reports the free memory of GPUs")
    return min(gpu.free_bytes for gpu in found)
