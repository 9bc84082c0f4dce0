"""Cores for ranks on CPUs: one for each, in both frameworks.

XLA's CPU client starts as many threads as there are cores that its process may use. Left alone, one rank would compute
on all cores of the machine, and two ranks would seem no faster. Kept to one core, a process would have one thread,
which can do nothing while it waits for other ranks; torch's Gloo waits on threads of its own. So it gets a second one.
"""

from __future__ import annotations

import os

# What XLA's CPU client takes for the number of cores.
ENVIRONMENT = {"NPROC": "2"}


def num_cores(kind: str, num_ranks: int) -> int:
    """Cores that a process of ranks is kept to; 0 where it is not.

    Args:
        kind: Of the ranks.
        num_ranks: Their number; those that are devices of one process share as many cores.
    """
    if kind == "gpus" or not hasattr(os, "sched_setaffinity"):
        return 0
    return min(num_ranks, len(os.sched_getaffinity(0))) if kind == "simulated" else 1


def keep_to_cores(kind: str, num_ranks: int, rank: int) -> None:
    """Keeps this process to its cores; call it before it has started threads.

    Args:
        kind: Of the ranks.
        num_ranks: Their number.
        rank: Of this process; where there are fewer cores than processes, some share one.
    """
    count = num_cores(kind, num_ranks)
    if count:
        there = sorted(os.sched_getaffinity(0))
        first = 0 if kind == "simulated" else rank % len(there)
        os.sched_setaffinity(0, there[first : first + count])
