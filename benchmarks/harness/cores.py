"""CPU cores for ranks: one per rank, in both frameworks.

XLA's CPU client starts a thread per core that its process may use, so a single rank would use all cores and two ranks
would look no faster. With one core it would have one thread, which cannot compute while it waits for other ranks, so it
is told of two; torch's Gloo has its own threads for waiting.
"""

from __future__ import annotations

import os


def environment(num_devices: int) -> dict[str, str]:
    """Variables for a process of so many of JAX's CPU devices: the number of cores that XLA's client assumes."""
    return {"NPROC": str(num_devices + 1)}


def num_cores(kind: str, num_ranks: int) -> int:
    """The cores that a process of ranks is restricted to, one per rank in it; 0 if it is not restricted."""
    if kind == "gpus" or not hasattr(os, "sched_setaffinity"):
        return 0
    return min(num_ranks, len(os.sched_getaffinity(0))) if kind == "simulated" else 1


def keep_to_cores(kind: str, num_ranks: int, rank: int) -> None:
    """Restricts this process to its cores; call it before threads start. Processes share cores if there are too few."""
    count = num_cores(kind, num_ranks)
    if count:
        there = sorted(os.sched_getaffinity(0))
        first = rank * count % len(there)
        os.sched_setaffinity(0, (there + there)[first : first + count])
